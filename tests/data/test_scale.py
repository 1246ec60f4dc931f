"""Any number of processes writes the bytes of one: ranks, torchrun, Ray; and no two runs spoil one folder."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from speccascade.data.collect import collect
from speccascade.data.config import CollectConfig, RayConfig
from speccascade.data.folders import sole_writer
from speccascade.data.workers import Worker, current_worker

from .test_collect import digests


def collect_as(config: CollectConfig, rank: int, count: int, patience: float = 0.0) -> None:
    """Runs in a process of its own, as one of the processes of a launcher."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    time.sleep(patience)
    collect(config)


def start(target: Any, *arguments: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


@pytest.mark.parametrize("count", [2, 3, 7])
def test_any_number_of_processes_ends_with_the_same_bytes(
    collect_config: CollectConfig, tmp_path: Path, count: int
) -> None:
    collect(collect_config)
    shared = replace(collect_config, out=str(tmp_path / "shared"))
    processes = [start(collect_as, shared, rank, count) for rank in range(count)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * count
    assert digests(shared.out) == digests(collect_config.out)


def test_whoever_ends_last_writes_the_manifest(collect_config: CollectConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Path(collect_config.out) / "manifest.json"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert collect(collect_config) is None
    assert sorted(path.name for path in manifest.parent.glob("*.parquet")) == [
        "part-00001.parquet", "part-00003.parquet"
    ]  # fmt: skip
    assert not manifest.exists()
    monkeypatch.setenv("RANK", "0")
    made = collect(collect_config)
    assert made is not None
    assert len(made.shards) == 5


def test_a_run_of_many_processes_goes_on_with_another_number(collect_config: CollectConfig, tmp_path: Path) -> None:
    collect(collect_config)
    shared = replace(collect_config, out=str(tmp_path / "shared"))
    processes = [start(collect_as, shared, rank, 3) for rank in (0, 2)]  # process 1 of 3 has died
    for process in processes:
        process.join()
    assert not (Path(shared.out) / "manifest.json").exists()
    collect(shared)
    assert digests(shared.out) == digests(collect_config.out)


def test_torchrun_ends_with_the_same_bytes(collect_config: CollectConfig, tmp_path: Path) -> None:
    collect(collect_config)
    out = tmp_path / "torchrun"
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "speccascade"]
    done = subprocess.run(
        [*run, "collect", "--config", str(write_yaml(collect_config, tmp_path)), f"--out={out}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert digests(out) == digests(collect_config.out)


def test_ray_ends_with_the_same_bytes(collect_config: CollectConfig, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    collect(collect_config)
    out = tmp_path / "ray"
    run = [sys.executable, "-m", "speccascade", "collect", "--config", str(write_yaml(collect_config, tmp_path))]
    done = subprocess.run(
        [*run, f"--out={out}", "--executor=ray", "--ray.workers=2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert digests(out) == digests(collect_config.out)


def write_yaml(config: CollectConfig, folder: Path) -> Path:
    """The settings of a tiny run as a user would write them."""
    path = folder / "collect.yaml"
    settings = {
        "pair": {"drafter": config.pair.drafter, "verifier": config.pair.verifier, "dtype": "float32", "device": "cpu"},
        "prompts": {"source": config.prompts.source, "chat": False, "splits": dict(config.prompts.splits)},
        **{name: getattr(config, name) for name in ("top_k", "batch_tokens", "shard_prompts")},
    }
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return path


def test_a_second_run_is_refused_whatever_its_size(tmp_path: Path) -> None:
    with sole_writer(tmp_path), pytest.raises(OSError, match="another run is writing to"), sole_writer(tmp_path, 0, 4):
        pass
    with sole_writer(tmp_path, 3, 4), pytest.raises(OSError, match="another run is writing to"), sole_writer(tmp_path):
        pass
    with sole_writer(tmp_path, 0, 2), sole_writer(tmp_path, 1, 2):
        pass


def test_locks_of_dead_processes_do_not_hold(collect_config: CollectConfig) -> None:
    process = start(collect_as, collect_config, 1, 2, 0.0)
    time.sleep(0.2)
    process.kill()
    process.join()
    assert process.exitcode in (-signal.SIGKILL, 0)
    assert collect(collect_config) is not None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, Worker()), ({"RANK": "0", "WORLD_SIZE": "1"}, Worker()), ({"RANK": "2", "WORLD_SIZE": "3"}, Worker(2, 3))],
)
def test_the_launcher_tells_the_rank(
    environment: dict[str, str], expected: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert current_worker() == expected


@pytest.mark.parametrize(
    "environment", [{"RANK": "1"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}]
)
def test_a_launcher_that_makes_no_sense_is_named(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE: expected"):
        current_worker()


def test_settings_of_ray_beside_a_local_run_are_refused(collect_config: CollectConfig) -> None:
    with pytest.raises(ValueError, match="ray: expected no settings beside executor 'local'"):
        replace(collect_config, ray=RayConfig(workers=3))
