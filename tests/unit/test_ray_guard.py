"""Calls of `ray.train` in the supervised loop: refused at once, however their names came into the loop's module."""

import subprocess
import sys
import textwrap

CHECK = """
from workers import ray_guard
from workers.errors import CallerError

def refused(call, replacement):
    try:
        call()
    except CallerError as error:
        text = str(error)
        assert "cannot work inside a supervised loop; use " in text, text
        assert replacement in text, text
        assert "\\n" not in text and ". " not in text, text
        return
    raise AssertionError("it was not refused")
"""


def run(source: str) -> None:
    """Run in a process of its own: a guard can't be taken off again."""
    code = CHECK + textwrap.dedent(source)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_functions_are_replaced_when_ray_train_was_imported_before() -> None:
    run("""
        import ray.train
        import ray.train.torch
        ray_guard.install()
        refused(lambda: ray.train.report({}), "session.report(metrics)")
        refused(lambda: ray.train.get_context(), "session.rank")
        refused(lambda: ray.train.torch.prepare_model(None), "fully_shard(model)")
        from ray.train import get_checkpoint
        refused(get_checkpoint, "session.restore()")
    """)


def test_functions_are_replaced_when_ray_train_is_imported_afterwards() -> None:
    run("""
        import sys
        ray_guard.install()
        ray_guard.install()  # once more changes nothing
        assert "ray.train" not in sys.modules
        from ray.train import report, get_dataset_shard
        refused(lambda: report({"loss": 1}, checkpoint=None), "session.report(metrics)")
        refused(lambda: get_dataset_shard("train"), "session.data_loader(dataset, ...)")
        from ray.train.torch import get_device, prepare_data_loader
        refused(get_device, "session.device")
        refused(lambda: prepare_data_loader(None), "session.data_loader(dataset, ...)")
        assert sum(type(finder).__name__ == "_Finder" for finder in sys.meta_path) == 1
    """)


def test_every_guarded_name_still_exists_in_ray_and_is_refused_naming_its_replacement() -> None:
    run(
        """
        ray_guard.install()
        import ray.train
        import ray.train.torch
        for module, names in ray_guard._GUARDED.items():
            for name, replacement in names.items():
                refused(getattr(sys.modules[module], name), replacement)
    """.replace("ray_guard.install()", "import sys\n        ray_guard.install()")
    )


def test_what_is_not_guarded_still_works() -> None:
    run("""
        ray_guard.install()
        from ray.train import RunConfig, ScalingConfig
        assert ScalingConfig(num_workers=2).num_workers == 2
        import importlib.resources
        assert importlib.resources.files("ray.train").joinpath("__init__.py").is_file()
    """)


def test_a_stray_ray_call_does_not_start_a_cluster_of_its_own() -> None:
    run("""
        ray_guard.install()
        import ray
        try:
            ray.put(1)
        except Exception as error:
            assert "init" in str(error), error
        else:
            raise AssertionError("it started a cluster")
        assert not ray.is_initialized()
    """)
