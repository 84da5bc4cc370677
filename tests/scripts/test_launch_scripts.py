"""scripts/launch with a stand-in for the launcher: what is started, and what signals and failures lead to."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "scripts" / "launch"
#: a launcher with one rank, which saves when it is told to end; itself it would end with an error
PYTHON = """#!/usr/bin/env bash
echo "$@" >> "$LOG"
trap 'echo launcher-signalled >> "$LOG"; exit 9' TERM
bash -c 'trap "echo saved >> $LOG; exit 0" TERM; touch $LOG.ready; for i in $(seq 400); do sleep 0.05; done; exit 3' &
while true; do wait $!; code=$?; [ $code -le 128 ] && exit $code; done
"""
SRUN = """#!/usr/bin/env bash
shift
echo $$ > "$LOG.step"
SLURM_NODEID=0 exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo node7; else echo "scontrol $*" >> "$LOG"; fi
"""
SCANCEL = """#!/usr/bin/env bash
kill -TERM "$(cat "$LOG.step")"
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, text in {"python": PYTHON, "srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def start(place: Path, script: str, **settings: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "PATH": f"{place}:{os.environ['PATH']}", "LOG": str(place / "log"), "PYTHON": str(place / "python"), **settings,
    }  # fmt: skip
    job = subprocess.Popen(
        ["bash", str(LAUNCH / script), "recipe.yaml", "train.lr=1e-4"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 100
    while not (place / "log.ready").exists():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return job


def test_a_node_passes_sigterm_to_the_ranks_and_not_to_the_launcher(place: Path) -> None:
    job = start(place, "node.sh", NODES="2", NODE_RANK="1", HEAD="h", PORT="77", RANKS="8", PIDFILE=str(place / "pid"))
    assert (place / "pid").read_text().strip() == str(job.pid)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    command, *rest = (place / "log").read_text().splitlines()
    assert rest == ["saved"]
    assert command == (
        "-m accelerate.commands.launch --config_file recipes/accelerate/two-nodes.yaml --num_machines 2 "
        "--num_processes 16 --machine_rank 1 --main_process_ip h --main_process_port 77 -m headstart.train recipe.yaml "
        "train.lr=1e-4"
    )
    assert not (place / "pid").exists()


def test_a_failed_rank_is_the_nodes_exit_code(place: Path) -> None:
    (place / "python").write_text('#!/usr/bin/env bash\ntouch "$LOG.ready"\nsleep 0.3\nexit 5\n')
    job = start(place, "node.sh")
    job.communicate(timeout=100)
    assert job.returncode == 5


def slurm(place: Path) -> subprocess.Popen[str]:
    directory = str(LAUNCH.parents[1])
    return start(
        place, "slurm.sh", SLURM_SUBMIT_DIR=directory, SLURM_JOB_ID="4711", SLURM_JOB_NODELIST="node[7-8]",
        SLURM_NNODES="2", SLURM_GPUS_ON_NODE="8",
    )  # fmt: skip


def test_slurm_saves_and_requeues_before_the_time_limit(place: Path) -> None:
    job = slurm(place)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    command, *rest = (place / "log").read_text().splitlines()
    assert rest == ["saved", "scontrol requeue 4711"]
    assert "--num_processes 16 --machine_rank 0 --main_process_ip node7 --main_process_port 24711" in command


def test_slurm_does_not_requeue_what_failed(place: Path) -> None:
    (place / "python").write_text('#!/usr/bin/env bash\ntouch "$LOG.ready"\nsleep 0.3\nexit 5\n')
    job = slurm(place)
    job.communicate(timeout=100)
    assert job.returncode == 5
    assert not (place / "log").exists()


def test_ssh_stops_the_other_machine_when_one_fails(place: Path) -> None:
    """The remote shell runs its command here; the second machine's launcher fails."""
    (place / "ssh").write_text(
        "#!/usr/bin/env bash\nhost=$1; shift\nexport LOG=$LOG.$host\n[ $host = two ] && export PYTHON=$BAD\n"
        'command="$*"\nexec bash -c "${command//PYTHON=*python/PYTHON=$PYTHON}"\n'
    )
    (place / "bad").write_text(
        '#!/usr/bin/env bash\nwhile [ ! -e "${LOG%.two}.one.ready" ]; do sleep 0.05; done\nexit 5\n'
    )
    for name in ("ssh", "bad"):
        (place / name).chmod(0o755)
    environment = os.environ | {
        "LOG": str(place / "log"), "PYTHON": str(place / "python"), "BAD": str(place / "bad"),
        "SSH": str(place / "ssh"), "HOSTS": "one two", "TMPDIR": str(place),
    }  # fmt: skip
    found = subprocess.run(
        ["bash", str(LAUNCH / "ssh.sh"), "recipe.yaml"], env=environment, capture_output=True, text=True, timeout=200
    )
    assert found.returncode == 5, found.stderr
    assert "two ended with code 5: stopping the others" in found.stderr
    assert (place / "log.one").read_text().splitlines()[-1] == "saved"
