"""What users may rely on, word for word: a change here is a change that the changelog has to name."""

import dataclasses

import orchestrator
import workers
from orchestrator import RecoveryConfig, SupervisedResult, SupervisedTrainer
from workers.session import Session


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_the_packages_export_these_names_and_no_others() -> None:
    assert orchestrator.__all__ == ["RecoveryConfig", "SupervisedResult", "SupervisedTrainer"]
    assert workers.__all__ == ["get_session"]
    for package in (orchestrator, workers):
        for name in package.__all__:
            assert getattr(package, name).__name__ == name


def test_a_session_has_these_methods_and_properties() -> None:
    calls = {"data_loader", "track", "restore", "end_micro_step", "end_step", "save_now", "report", "finish", "phase"}
    facts = {"rank", "local_rank", "world_size", "device", "generation", "step", "progress"}
    assert public(Session) == calls | facts
    assert {name for name in facts if isinstance(vars(Session)[name], property)} == facts


def test_the_recovery_settings_have_these_names_and_defaults() -> None:
    assert {field.name: field.default for field in dataclasses.fields(RecoveryConfig)} == {
        "cadence": "auto",
        "save_overhead_max": 0.01,
        "snapshot_every_steps": "auto",
        "snapshot_overhead_max": 0.02,
        "failures_per_node_day": 6.5e-3,
        "save_at_end": True,
        "keep_last": 3,
        "keep_last_min": 1,
        "max_failures": None,
        "snapshot_slots": 3,
        "replicate_snapshots": True,
        "replication_bytes_per_second_max": None,
        "memory_fraction_max": 0.9,
        "verify_saves": True,
        "verify_bytes_per_second_max": None,
        "save_timeout_seconds": 600.0,
        "save_stalled_seconds": 60.0,
        "unprotected_seconds_max": None,
        "on_unprotected": "warn",
        "collective_timeout_seconds": 600.0,
        "hang_seconds_min": 2.0,
        "start_seconds_max": 600.0,
        "sigterm_seconds": 25.0,
        "takeover_seconds": 30.0,
        "on_bad_loss": "stop",
        "loss_spike_factor": None,
        "total_steps": None,
        "record_samples": True,
        "metrics_port": 0,
        "metrics_host": "127.0.0.1",
        "check_replicas": True,
        "checkpoint_storage": None,
        "preload": (),
        "volatile": (),
        "failpoints": (),
    }
    assert all(field.kw_only for field in dataclasses.fields(RecoveryConfig))


def test_every_recovery_setting_is_explained() -> None:
    for field in dataclasses.fields(RecoveryConfig):
        assert f"\n    {field.name}: " in (RecoveryConfig.__doc__ or "")


def test_the_trainer_and_its_result_have_these_members() -> None:
    assert public(SupervisedTrainer) == {"fit", "status", "run_dir"}
    own = {field.name for field in dataclasses.fields(SupervisedResult)}
    ray_own = {field.name for field in dataclasses.fields(SupervisedResult.__mro__[1])}
    assert own - ray_own == {"step", "generation", "committed_checkpoint", "ledger", "run_dir"}
