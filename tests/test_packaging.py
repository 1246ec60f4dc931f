"""The wheel holds exactly the tracked files, and works away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("cascade", "router", "data", "training", "eval", "configs")


def _run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} exited {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def _tracked_files() -> list[str]:
    """Files under version control that are there, and new ones that are not ignored."""
    listed = _run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files, so that a build leaves nothing in the checkout and takes nothing stale from it."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout to know which files belong in the wheel")
    tree = tmp_path_factory.mktemp("source")
    for name in _tracked_files():
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    return tree


@pytest.fixture(scope="module")
def wheel(source_tree: Path) -> Path:
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", ".", cwd=source_tree)
    (built,) = (source_tree / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel in it and nothing of the checkout."""
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def _run_python(code: str, installed: Path) -> str:
    """Run code where only the wheel and the dependencies can be imported (-P keeps the current folder out)."""
    return _run(sys.executable, "-c", code, cwd=installed, PYTHONPATH=str(installed)).strip()


def test_wheel_holds_the_tracked_files_and_no_others(wheel: Path) -> None:
    expected = set()
    for name in _tracked_files():
        top, _, rest = name.partition("/")
        if top in FOLDERS and name.endswith((".py", ".yaml")):
            expected.add(f"speccascade/{top}/{rest}")
        elif top == "speccascade" and name.endswith((".py", "py.typed")):
            expected.add(name)
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected, f"only in the wheel: {sorted(held - expected)}; missing: {sorted(expected - held)}"


def test_folders_hold_only_what_is_packaged() -> None:
    strays = [
        name
        for name in _tracked_files()
        if name.partition("/")[0] in FOLDERS and not name.endswith(".yaml" if name.startswith("configs/") else ".py")
    ]
    assert not strays, f"these would be missing from the wheel: {strays}"


def test_installed_package_imports_from_its_own_folder(installed: Path) -> None:
    code = (
        "import speccascade, importlib; "
        "modules = [importlib.import_module('speccascade.' + n)"
        " for n in ('cascade', 'router', 'data', 'training', 'eval', 'cli')]; "
        "print(*[m.__file__ for m in [speccascade, *modules]], sep='\\n')"
    )
    places = _run_python(code, installed).splitlines()
    assert len(places) == 7
    assert all(Path(place).is_relative_to(installed) for place in places), places


def test_installed_package_claims_no_bare_name(installed: Path) -> None:
    names = {entry.name for entry in installed.iterdir() if not entry.name.endswith(".dist-info")}
    assert names == {"speccascade"}


def test_import_is_fast_and_loads_no_framework(installed: Path) -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import speccascade, speccascade.cli; "
        "print(time.perf_counter() - start, *(m for m in ('torch', 'transformers', 'numpy') if m in sys.modules))"
    )
    runs = [_run_python(code, installed).split() for _ in range(3)]
    assert all(len(run) == 1 for run in runs), f"importing speccascade loads {runs[0][1:]}"
    assert min(float(run[0]) for run in runs) <= 0.2, f"import takes {runs} s, expected at most 0.2"
