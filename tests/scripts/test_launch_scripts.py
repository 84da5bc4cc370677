"""scripts/launch with a stand-in for the launcher: what is started, and what signals and failures lead to."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from headstart.commands.scripts import write_scripts
from headstart.heads.errors import StorageError

LAUNCH = Path(__file__).resolve().parents[2] / "scripts" / "launch"
#: a launcher with one rank, which saves when it is told to end; itself it would end with an error
PYTHON = """#!/usr/bin/env bash
echo "$@" >> "$LOG"
trap 'echo launcher-signalled >> "$LOG"; exit 9' TERM
bash -c 'trap "echo saved >> $LOG; exit 0" TERM; touch $LOG.ready; for i in $(seq 400); do sleep 0.05; done; exit 3' &
while true; do wait $!; code=$?; [ $code -le 128 ] && exit $code; done
"""
#: a launcher whose ranks take a moment until they can handle a signal, and which starts the second one later
SLOW = """#!/usr/bin/env bash
trap 'echo launcher-signalled >> "$LOG"; exit 9' TERM
rank='sleep .4; trap "echo saved >> $LOG; exit 0" TERM; touch $LOG.$1; for i in $(seq 400); do sleep 0.05; done; exit 3'
bash -c "$rank" rank 1 &
first=$!
touch "$LOG.ready"
sleep 0.6
bash -c "$rank" rank 2 &
wait $first; one=$?; wait $!; exit $((one + $?))
"""
#: a launcher that has started no rank yet
STARTING = """#!/usr/bin/env bash
trap 'echo launcher-signalled >> "$LOG"; exit 1' TERM
touch "$LOG.ready"
while [ $SECONDS -lt 20 ]; do :; done
exit 3
"""
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do echo "srun $1" >> "$LOG"; shift; done
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


@pytest.mark.parametrize("after_s", [0.0, 0.25, 0.5])
def test_a_signal_while_ranks_start_reaches_each_once_it_can_save(place: Path, after_s: float) -> None:
    """Signalled earlier, a rank would die without a word, and the job would end with an error."""
    (place / "python").write_text(SLOW)
    job = start(place, "node.sh")
    time.sleep(after_s)
    job.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    job.send_signal(signal.SIGTERM)  # schedulers repeat themselves
    _, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    assert (place / "log").read_text().splitlines() == ["saved", "saved"]


def test_a_signal_before_there_are_ranks_ends_the_launcher_and_is_no_failure(place: Path) -> None:
    (place / "python").write_text(STARTING)
    job = start(place, "node.sh", STOPPED=str(place / "stopped"))
    began = time.monotonic()
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=100)
    assert job.returncode == 0 and time.monotonic() - began < 10
    assert (place / "log").read_text().splitlines() == ["launcher-signalled"]
    assert (place / "stopped").exists()


def test_machines_that_do_not_meet_are_told_where_and_the_job_ends(place: Path) -> None:
    (place / "python").write_text(STARTING)
    job = start(place, "node.sh", NODES="2", NODE_RANK="1", HEAD="h", PORT="77", MEET_S="1")
    began = time.monotonic()
    _, err = job.communicate(timeout=100)
    assert job.returncode == 1 and time.monotonic() - began < 15
    assert "error: machine 1 of 2: within 1 s the launcher started no rank" in err and "HEAD=h PORT=77" in err


@pytest.mark.parametrize("signalled", [False, True])
def test_nothing_outlives_a_node(place: Path, signalled: bool) -> None:
    """What looks after the launcher would signal its process id, which is somebody else's by then."""
    if not signalled:
        (place / "python").write_text('#!/usr/bin/env bash\ntouch "$LOG.ready"\nsleep 0.3\nexit 5\n')
    job = start(place, "node.sh", MARK=str(place))
    if signalled:
        job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=100) == (0 if signalled else 5)
    deadline = time.monotonic() + 0.4  # a signal needs its time; by itself it would end within a second
    while left := [one for one in processes_with(f"MARK={place}") if not one.startswith("sleep ")]:
        assert time.monotonic() < deadline, left
    assert job.communicate(timeout=100)[1] == ""


def processes_with(setting: str) -> list[str]:
    """Command lines of the processes that have `setting` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if setting.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            pass
    return found


def slurm(place: Path, **more: str) -> subprocess.Popen[str]:
    (place / "checkout").mkdir()
    (place / "checkout" / "scripts").symlink_to(LAUNCH.parent)
    return start(
        place, "slurm.sh", SLURM_SUBMIT_DIR=str(place / "checkout"), SLURM_JOB_ID="4711", SLURM_NNODES="2",
        SLURM_JOB_NODELIST="node[7-8]", SLURM_GPUS_ON_NODE="8", **more,
    )  # fmt: skip


def log_of(place: Path) -> list[str]:
    """What was started and done, without srun's own options."""
    lines = (place / "log").read_text().splitlines() if (place / "log").exists() else []
    return [line for line in lines if not line.startswith("srun ")]


def test_slurm_saves_and_requeues_before_the_time_limit(place: Path) -> None:
    job = slurm(place)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    command, *rest = log_of(place)
    assert rest == ["saved", "scontrol requeue 4711"]
    assert "--num_processes 16 --machine_rank 0 --main_process_ip node7 --main_process_port 24711" in command


def test_slurm_requeues_when_only_the_steps_were_signalled(place: Path) -> None:
    """A pre-emption with a grace time does not signal the batch script."""
    job = slurm(place)
    os.kill(int((place / "log.step").read_text()), signal.SIGTERM)
    _, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    assert log_of(place)[1:] == ["saved", "scontrol requeue 4711"]
    assert not list((place / "checkout").glob(".slurm-*"))


def test_slurm_hands_its_cpus_to_the_step_and_a_job_that_comes_back_goes_on(place: Path) -> None:
    (place / "python").write_text('#!/usr/bin/env bash\necho "$@" >> "$LOG"\ntouch "$LOG.ready"\nsleep 0.3\n')
    stale = place / "checkout" / ".slurm-4711.stopped"
    job = slurm(place, SLURM_CPUS_PER_TASK="64", SLURM_RESTART_COUNT="1")
    job.communicate(timeout=100)
    assert job.returncode == 0 and not stale.exists()
    assert "srun --cpus-per-task=64" in (place / "log").read_text().splitlines()
    (command,) = log_of(place)  # it ended by itself: not back in the queue
    assert command.endswith("recipe.yaml train.lr=1e-4 train.resume=true")


@pytest.mark.parametrize("code", [0, 5])
def test_slurm_does_not_requeue_what_ended_by_itself(place: Path, code: int) -> None:
    (place / "python").write_text(f'#!/usr/bin/env bash\ntouch "$LOG.ready"\nsleep 0.3\nexit {code}\n')
    job = slurm(place)
    job.communicate(timeout=100)
    assert job.returncode == code
    assert log_of(place) == []


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


def test_ssh_ends_well_once_every_machine_has(place: Path) -> None:
    (place / "ssh").write_text('#!/usr/bin/env bash\nexport LOG=$LOG.$1; shift\nexec bash -c "$*"\n')
    (place / "ssh").chmod(0o755)
    (place / "python").write_text('#!/usr/bin/env bash\necho "$@" > "$LOG"; sleep 0.2\n')
    environment = os.environ | {
        "LOG": str(place / "log"), "PYTHON": str(place / "python"), "SSH": str(place / "ssh"), "HOSTS": "one two",
    }  # fmt: skip
    command = ["bash", str(LAUNCH / "ssh.sh"), "recipe.yaml", "train.lr=1e-4"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0 and found.stderr == ""
    for rank, host in enumerate(("one", "two")):
        said = (place / f"log.{host}").read_text()
        assert f"--num_machines 2 --num_processes 16 --machine_rank {rank} --main_process_ip one" in said
        assert said.endswith("-m headstart.train recipe.yaml train.lr=1e-4\n")


def test_ssh_stops_a_machine_whose_part_was_not_running_yet(place: Path) -> None:
    """The connection takes a second; the signal comes before."""
    (place / "ssh").write_text(
        '#!/usr/bin/env bash\nshift\ncase $1 in cd*) touch $LOG.connecting; sleep 1 ;; esac\nexec bash -c "$*"\n'
    )
    (place / "ssh").chmod(0o755)
    environment = os.environ | {
        "LOG": str(place / "log"), "PYTHON": str(place / "python"), "SSH": str(place / "ssh"), "HOSTS": "one",
    }  # fmt: skip
    job = subprocess.Popen(
        ["bash", str(LAUNCH / "ssh.sh"), "recipe.yaml"], env=environment, stderr=subprocess.PIPE, text=True
    )
    while not (place / "log.connecting").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    assert (place / "log").read_text().splitlines()[1:] in ([], ["saved"], ["launcher-signalled"])


def test_scripts_that_were_written_elsewhere_launch_from_there(place: Path, tmp_path: Path) -> None:
    """An installation without a checkout: what node.sh names lies beside it, and its paths are relative to that."""
    written = write_scripts(tmp_path / "my cluster")
    assert write_scripts(tmp_path / "my cluster") == written  # the same files are no obstacle
    node = tmp_path / "my cluster" / "scripts" / "launch" / "node.sh"
    (place / "python").write_text('#!/usr/bin/env bash\necho "$PWD|$*" > "$LOG"; test -f "$4"\n')
    settings = os.environ | {"LOG": str(place / "log"), "PYTHON": str(place / "python"), "RANKS": "2"}
    assert subprocess.run([node, "mine.yaml"], env=settings, cwd="/", timeout=60).returncode == 0
    where, _, words = (place / "log").read_text().strip().partition("|")
    assert where == str(tmp_path / "my cluster")
    assert "--config_file recipes/accelerate/two-nodes.yaml" in words and words.endswith("-m headstart.train mine.yaml")
    node.write_text("mine")
    with pytest.raises(StorageError, match="node.sh: exists and holds something else"):
        write_scripts(tmp_path / "my cluster")
    assert node.read_text() == "mine"
    with pytest.raises(StorageError, match="choose another place with headstart scripts DIR"):
        write_scripts(node / "below a file")
