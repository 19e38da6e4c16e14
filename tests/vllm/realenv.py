"""Where the real vLLM and TRL are, and the models and processes made with them.

The proxy runs in the environment that runs pytest; everything that needs torch is a process of the real venv's python,
which `make real` installs and `make test` names in LORAFLEET_REAL_PYTHON.
"""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
_watchers: dict[int, subprocess.Popen[bytes]] = {}


def real_python() -> Path:
    """The python that has vLLM and TRL.

    Raises RuntimeError when there is none: these tests fail then, for a run that leaves them out says so itself
    (-m "not real").
    """
    named = os.environ.get("LORAFLEET_REAL_PYTHON")
    if not named:
        script = subprocess.run(
            ["sh", str(HERE / "provision.sh"), "--print"], capture_output=True, text=True, check=False
        )
        named = script.stdout.strip()
        if not named:
            raise RuntimeError(f'{script.stderr.strip()} (or leave these tests out: -m "not real")')
    python = Path(named)
    if not python.is_file():
        raise RuntimeError(f"LORAFLEET_REAL_PYTHON is {named}, which is not there: run 'make real'")
    return python


def real_home() -> Path:
    """The directory of provision.sh: outside the checkout, kept from run to run."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("LORAFLEET_REAL_HOME") or f"{cache}/lorafleet")


def model_directory(size: str = "tiny") -> Path:
    """`model/` and `adapters/` as tiny_model.py makes them; made once for each content of that script and each venv."""
    python, script = real_python(), HERE / "tiny_model.py"
    key = hashlib.sha256(script.read_bytes() + str(python).encode() + size.encode()).hexdigest()[:12]
    target = real_home() / f"model-{size}-{key}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    made = subprocess.run(
        [str(python), str(script), str(scratch), "--size", size],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if made.returncode:
        shutil.rmtree(scratch)
        raise RuntimeError(f"tiny_model.py failed:\n{made.stdout}{made.stderr}")
    try:
        scratch.rename(target)
    except OSError:  # another run was first; its result is the same
        shutil.rmtree(scratch)
    return target


def free_port() -> int:
    """A port that was free a moment ago; vLLM cannot be asked which one it took when given 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spawn(
    command: Sequence[str], log: Path, *, cwd: Path | None = None, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a process in a group of its own, its output appended to `log`.

    The whole group ends with this process, even by kill -9: a shell in it waits for the pipe held here to close.
    vLLM's engine processes would otherwise outlive everybody.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=dict(env),
            process_group=0,
        )
    _watchers[process.pid] = subprocess.Popen(
        ["sh", "-c", f"read -r _; kill -9 -{process.pid}"], stdin=subprocess.PIPE, process_group=process.pid
    )
    return process


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the process and all it started."""
    watcher = _watchers.pop(process.pid, None)
    if watcher is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    assert watcher.stdin is not None
    watcher.stdin.close()
    watcher.wait(30)
    process.wait(30)


def tail(log: Path, lines: int = 40) -> str:
    """The end of a log, for an error message."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no output)"
