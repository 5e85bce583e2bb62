"""The package that users install: sdist, wheel, and what works in a fresh environment without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("common", "replay", "reward", "rollout", "learner", "launch")
VERSIONS = (*(pytest.param(v, marks=pytest.mark.byhand) for v in ("3.11", "3.12")), "3.13")
HEAVY = ("torch", "transformers", "vllm", "deepspeed")
INSTALL_DEADLINE_S = 400


def run(*command: str | Path, cwd: Path, timeout: float = 120) -> str:
    """Run a command outside the repository; its output. Nothing of this environment leaks in."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout[-4000:]}"
    return done.stdout


def interpreters(version: str) -> list[Path]:
    """Where a Python of this version may be: PATH, pyenv's versions, uv's."""
    folders = [Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep) if entry]
    roots = [Path.home() / ".pyenv", *(entry.parent for entry in folders if entry.name == "shims")]
    if "PYENV_ROOT" in os.environ:
        roots.append(Path(os.environ["PYENV_ROOT"]))
    for root in roots:
        folders += sorted((root / "versions").glob(f"{version}*/bin"))
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local/share/uv/python"))
    folders += sorted(uv.glob(f"cpython-{version}*/bin"))
    return [
        folder / f"python{version}" for folder in folders if (folder / f"python{version}").exists()
    ]


def find_interpreter(version: str) -> Path | None:
    """A Python of this version that runs (a shim on PATH may not) and can make environments."""
    question = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    for path in interpreters(version):
        done = subprocess.run(
            [str(path), "-I", "-c", question],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode == 0 and done.stdout.strip() == version:
            return path
    return None


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    """The wheel."""
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="session", params=VERSIONS)
def fresh(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A fresh environment outside the repository with the wheel and its core dependencies alone."""
    version: str = request.param
    base = find_interpreter(version)
    if base is None:
        pytest.skip(f"no working Python {version} on PATH, with pyenv or with uv")
    folder = tmp_path_factory.mktemp(f"python{version}")
    run(base, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    install(folder, str(wheel))
    return folder


def install(folder: Path, what: str) -> None:
    """Install into the environment of ``folder``, with this environment's pip."""
    run(
        *(sys.executable, "-m", "pip", "--python", folder / "venv/bin/python", "install"),
        *(
            "--no-input",
            "--quiet",
            "--no-compile",
            "--only-binary",
            ":all:",
            "-c",
            ROOT / "constraints.txt",
            what,
        ),
        cwd=folder,
        timeout=INSTALL_DEADLINE_S,
    )


def python(folder: Path, code: str) -> str:
    """Run code with the environment's Python, isolated from this one."""
    return run(folder / "venv/bin/python", "-I", "-c", code, cwd=folder)


NOTHING_HEAVY = f"""
import sys
heavy = sorted(set({HEAVY!r}) & {{name.partition(".")[0] for name in sys.modules}})
assert not heavy, f"imported {{heavy}}"
"""
IMPORT_ALL_OF = """
import importlib, pkgutil
def import_all(name):
    room = importlib.import_module(name)
    for found in pkgutil.walk_packages(room.__path__, name + "."):
        if not found.name.endswith(".__main__"):
            importlib.import_module(found.name)
"""


def test_the_wheel_holds_the_six_rooms_under_tandem_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    rooms = {name.split("/")[1] for name in names if name.startswith("tandem/")}
    assert tops == {"tandem"}
    assert rooms == set(ROOMS)


def test_the_wheel_holds_every_module_and_data_file_of_the_rooms(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    missing = [
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".py", ".lua", ".yaml", ".json", ".html", ".js", ".css", ".safetensors"}
        and f"tandem/{path.relative_to(ROOT)}" not in packed
    ]
    assert not missing


def test_the_sdist_holds_the_rooms_and_their_tests(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if name.count("/") >= 1}
    assert tops >= {*ROOMS, "tests", "constraints.txt", "pyproject.toml", "README.md", "LICENSE"}
    assert ".import" not in tops


@pytest.mark.timeout(INSTALL_DEADLINE_S + 60)
def test_the_core_brings_no_torch(fresh: Path) -> None:
    python(
        fresh,
        "from importlib.util import find_spec\n"
        f"found = [name for name in {HEAVY!r} if find_spec(name)]\n"
        "assert not found, found",
    )


@pytest.mark.timeout(INSTALL_DEADLINE_S + 60)
def test_the_command_answers_with_the_core_alone(fresh: Path) -> None:
    assert "start" in run(fresh / "venv/bin/tandem", "--help", cwd=fresh)


@pytest.mark.timeout(INSTALL_DEADLINE_S + 60)
def test_presets_and_scripts_are_found_in_the_installed_package(fresh: Path) -> None:
    python(
        fresh,
        "from importlib.resources import files\n"
        "import yaml\n"
        "presets = list(files('tandem.launch').joinpath('configs').iterdir())\n"
        "presets = [p for p in presets if p.name.endswith('.yaml')]\n"
        "scripts = list(files('tandem.replay').joinpath('scripts').iterdir())\n"
        "scripts = [s for s in scripts if s.name.endswith('.lua')]\n"
        "assert presets and scripts, (presets, scripts)\n"
        "assert all(isinstance(yaml.safe_load(p.read_text()), dict) for p in presets)\n"
        "assert all(s.read_text().strip() for s in scripts)\n",
    )


@pytest.mark.timeout(INSTALL_DEADLINE_S + 60)
def test_config_wire_and_replay_import_without_torch(fresh: Path) -> None:
    python(
        fresh,
        "import tandem.common.config, tandem.common.records, tandem.common.wire\n"
        + IMPORT_ALL_OF
        + "import_all('tandem.replay')\n"
        + NOTHING_HEAVY,
    )


@pytest.mark.timeout(INSTALL_DEADLINE_S + 60)
def test_reward_imports_without_torch(fresh: Path, wheel: Path) -> None:
    install(fresh, f"{wheel}[reward]")
    python(fresh, IMPORT_ALL_OF + "import_all('tandem.reward')\n" + NOTHING_HEAVY)


def requirements() -> list[Requirement]:
    """Every direct dependency, of the core and of all extras, save Tandem's own extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        lines += extra
    found = [Requirement(line) for line in lines]
    return [requirement for requirement in found if requirement.name != project["name"]]


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_set_up_of_a_gpu_host_has_a_solution(version: str, tmp_path: Path) -> None:
    uv = shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent)
    assert uv, "the set-up brings uv: bash launch/setup.sh --dev"
    command = [uv, "pip", "compile", ROOT / "pyproject.toml", "-c", ROOT / "constraints.txt"]
    command += ["--extra", "gpu", "--python-version", version]
    command += ["--python-platform", "x86_64-unknown-linux-gnu"]
    found = subprocess.run(
        [*command, "-q", "-o", tmp_path / "found.txt"], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    assert re.search(r"^vllm==", (tmp_path / "found.txt").read_text(), re.MULTILINE)


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = {
        name.lower().replace("_", "-"): Version(version)
        for name, _, version in (line.partition("==") for line in lines if "==" in line)
        if not name.startswith("#")
    }
    wrong = [
        str(requirement)
        for requirement in requirements()
        if (pin := pins.get(requirement.name.lower().replace("_", "-"))) is None
        or not requirement.specifier.contains(pin)
    ]
    assert not wrong


def test_flash_attention_is_in_no_other_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    holding = [name for name, lines in extras.items() if "flash-attn" in str(lines)]
    assert holding == ["flash"]
    assert "flash" not in Requirement(extras["gpu"][0]).extras


def test_the_links_for_editable_installs_lead_to_the_rooms() -> None:
    links = {path.name: path.resolve() for path in (ROOT / ".import/tandem").iterdir()}
    assert links == {room: ROOT / room for room in ROOMS}
