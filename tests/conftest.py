"""Fixtures that all tests share: one Ray per test session, in its own temporary directory, and one browser."""

import os
import shutil
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Examples are slow on a machine that others use too; how long one takes says nothing about whether it is right.
hypothesis.settings.register_profile("lastgood", deadline=None)
hypothesis.settings.load_profile("lastgood")

RAY_CPUS_MIN = 4
# Ray Train takes one report each time it polls, and ends when it has taken all: every 2 s without this.
RAY_POLL_SECONDS = 0.2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none; torch is only imported if there are any."""
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needing_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Path]:
    """A local Ray that the whole test session shares; yields its temporary directory.

    Its CPUs are logical: more than the machine may have, since ranks of tiny models mostly wait.
    """
    import ray

    # Short, because Ray puts Unix sockets below it, and their paths end at 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="lg-ray-"))
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", str(RAY_POLL_SECONDS))
    ray.init(
        address="local",
        num_cpus=max(RAY_CPUS_MIN, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(directory),
    )
    yield directory
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of a server that speaks S3's protocol, with nothing in it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_url(s3: str) -> str:
    """A new bucket there, as the URL of object storage that anybody may use."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    public = {"x-amz-acl": "public-read-write"}
    urllib.request.urlopen(urllib.request.Request(f"{s3}/{name}", method="PUT", headers=public)).close()
    return f"s3://{name}/runs?endpoint={s3}&region=us-east-1&skip_signature=true&virtual_hosted_style_request=false"


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """A headless Chromium, the one that the machine has; nothing is downloaded. Without one its tests are skipped, but
    in CI they fail.

    One a module: until it is closed, an event loop is running on this thread, so that `asyncio.run` is refused.
    """
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        need = "these tests need Chromium, and there is no command of that name"
        if os.environ.get("CI") == "true":
            pytest.fail(need)
        pytest.skip(need)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Containers rarely let a process make the namespaces of Chromium's sandbox.
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()
