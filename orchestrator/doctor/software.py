"""Whether the packages that a run needs are there, in versions that are supported, and whether they import.

The versions come from what is installed and the supported ranges from lastgood's own metadata. Importing happens in a
process of its own: it takes seconds, and the command line stays free of torch and Ray.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version

import psutil
from packaging.requirements import Requirement

from orchestrator.doctor.facts import MONITOR_VARIABLE, Import, Package, Software

MODULES = ("torch", "ray.train.torch", "workers.session", "orchestrator.trainer")
_HERE = "this shell"
_IMPORT_SECONDS = 180.0
# Whatever the modules print goes to stderr, which is dropped.
_CHILD = """
import importlib, json, os, sys, time
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
found = []
for module in sys.argv[1:]:
    began = time.monotonic()
    try:
        importlib.import_module(module)
        problem = ""
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"
    found.append({"module": module, "seconds": time.monotonic() - began, "problem": problem})
torch = sys.modules.get("torch")
json.dump({"imports": found, "cuda": torch.cuda.is_available() if torch else None}, out)
out.flush()
os._exit(0)
"""


def look_at_software(modules: Iterable[str] = MODULES) -> Software:
    """Takes as long as importing torch and Ray does."""
    imports, cuda = try_imports(tuple(modules))
    return Software(
        python=platform.python_version(),
        packages=look_at_packages(requires("lastgood") or []),
        imports=imports,
        cuda=cuda,
        ray_monitor=look_at_ray_monitor(),
    )


def look_at_packages(requirements: Iterable[str]) -> list[Package]:
    """Each distribution required, with the range; those of an extra are left out."""
    packages = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = None
        fits = found is not None and requirement.specifier.contains(found, prereleases=True)
        packages.append(Package(name=requirement.name, version=found, wanted=str(requirement.specifier), fits=fits))
    return packages


def try_imports(modules: tuple[str, ...]) -> tuple[list[Import], bool | None]:
    """(what importing them, in order and in one fresh process, gave; whether torch found a GPU)."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _CHILD, *modules],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [_not_imported(modules, f"not done after {_IMPORT_SECONDS:.0f} s")], None
    if done.returncode != 0:
        return [_not_imported(modules, f"the process that imported them ended with status {done.returncode}")], None
    answer = json.loads(done.stdout)
    return [Import(**each) for each in answer["imports"]], answer["cuda"]


def look_at_ray_monitor() -> dict[str, str | None]:
    """The variable that sets Ray's memory monitor: where Ray runs here it counts for that Ray, else for one to come."""
    found: dict[str, str | None] = {}
    for process in psutil.process_iter(["name", "pid"]):
        if process.info["name"] == "raylet":
            try:
                found[f"raylet {process.info['pid']}"] = process.environ().get(MONITOR_VARIABLE)
            except psutil.Error:
                continue  # another user's, or gone
    return found or {_HERE: os.environ.get(MONITOR_VARIABLE)}


def _not_imported(modules: tuple[str, ...], problem: str) -> Import:
    return Import(module=", ".join(modules), seconds=0.0, problem=problem)
