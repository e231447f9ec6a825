"""Preflight of a rendered project: in order, and with each thing that it must find; its pure parts by themselves."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)
Part = Callable[[str], ModuleType]
PREFLIGHT = ("-m", "flight.ddp.preflight", "--train.steps", "7")  # it leaves training's own arguments alone
IN_ORDER = "preflight: everything is in order"


@pytest.fixture(scope="module")
def project(render: Callable[..., Path]) -> Path:
    return render({"package": "flight"}, name="flight")


@pytest.fixture(scope="module")
def part(project: Path) -> Iterator[Part]:
    """Imports a module of the project's plumbing."""
    sys.path.insert(0, str(project / "src"))
    yield lambda name: importlib.import_module(f"flight.ddp.{name}")
    sys.path.remove(str(project / "src"))


@pytest.fixture
def there(project: Path, tmp_path: Path) -> Path:
    """A directory to start it in, with nothing but the settings."""
    shutil.copytree(project / "configs", tmp_path / "configs")
    return tmp_path


def environment(project: Path, **variables: str) -> dict[str, str]:
    ours = ("DDP_", "NCCL_", "GLOO_", "MASTER_", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1", **variables}


def torchrun(
    project: Path, there: Path, *words: str, ranks: int = 2, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Preflight below torchrun, which turns every exit code but 0 into 1: see outcome.json for the code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", *(words or PREFLIGHT)]
    given = {"DDP_RUN__ID": "try", **variables}
    return subprocess.run(
        command, cwd=there, env=environment(project, **given), capture_output=True, text=True, timeout=100, check=False
    )


def by_hand(project: Path, there: Path, rank: int, size: int, port: int, **variables: str) -> subprocess.Popen[str]:
    """One rank without a launcher, whose exit code is its own."""
    given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **variables}
    command = [sys.executable, *PREFLIGHT]
    piped = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=there, env=environment(project, **given), stdout=piped, stderr=piped, text=True
    )


def ended(*ranks: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """Exit code, standard output and error of each; none is left running."""
    try:
        outputs = [rank.communicate(timeout=90) for rank in ranks]
        return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()


def outcome(there: Path) -> dict[str, Any]:
    return dict(json.loads((there / "runs" / "try" / "outcome.json").read_text()))


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# ------------------------------------------------------------------------------------------------ started for real


@pytest.mark.slow
def test_three_ranks_in_order(project: Path, there: Path) -> None:
    done = torchrun(project, there, ranks=3)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith(IN_ORDER)  # on a busy machine a link may be slow, a warning
    assert lines[-2].startswith("preflight took ")
    assert [line.split()[0] for line in lines[:4]] == ["rank", "0", "1", "2"]
    assert sum(line.startswith("both ways") for line in lines) == 3, "every pair is timed"
    assert "slowest pair of ranks on a node: rank " in done.stdout
    assert not (there / "runs" / "try").exists(), "nothing is left for training to stumble over"
    assert list((there / "runs").iterdir()) == []


def test_one_process_and_json(project: Path, there: Path) -> None:
    command = [sys.executable, *PREFLIGHT, "--json"]
    done = subprocess.run(
        command, cwd=there, env=environment(project), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["version"], found["exit_code"], found["findings"], found["links"]) == (1, 0, [], [])
    assert [one["host"] for one in found["rows"]] == [socket.gethostname()]


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"GLOO_SOCKET_IFNAME": "none9"}, "GLOO_SOCKET_IFNAME names none9, which is no interface of this host"),
        pytest.param(
            {"DDP_LOADER__WORKERS": "1", "DDP_LOADER__BATCH_MB": "1e9"},
            "0 of 1 loader workers fit: /dev/shm has",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_wrong_on_every_rank_is_said_once(
    project: Path, there: Path, variables: dict[str, str], says: str
) -> None:
    done = torchrun(project, there, **variables)
    problem = f"problem: ranks 0-1 ({socket.gethostname()}): {says}"
    assert done.stdout.count(problem) == 1, done.stdout + done.stderr
    assert "\n  -> " in done.stdout
    assert done.stdout.splitlines()[-1] == "preflight: 1 problem, see above"
    assert (outcome(there)["exit_code"], outcome(there)["kind"]) == (78, "launcher_misconfig")
    assert says in outcome(there)["reason"]


@pytest.mark.slow
def test_a_directory_that_cannot_be_written(project: Path, there: Path) -> None:
    (there / "runs").write_text("a file in its place")  # root may write everywhere
    port = free_port()
    results = ended(*(by_hand(project, there, rank, 2, port) for rank in range(2)))
    assert [code for code, *_ in results] == [78, 78], results
    assert f"cannot write to {there / 'runs'}: " in results[0][1]
    assert "both ways" in results[0][1], "the links are measured all the same"


def test_a_port_that_is_taken_has_its_own_kind(project: Path, there: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        results = ended(by_hand(project, there, 0, 2, port, DDP_RUN__ID="try"))
    assert results[0][0] == 78, results
    assert (outcome(there)["exit_code"], outcome(there)["kind"]) == (78, "port_in_use")


@pytest.mark.slow
def test_a_directory_that_is_not_shared(project: Path, there: Path) -> None:
    script = f'DDP_RUN__DIR=runs$RANK exec {sys.executable} "$@"'
    done = torchrun(project, there, "--no-python", "bash", "-c", script, "bash", *PREFLIGHT, ranks=3)
    who = f"problem: ranks 1-2 ({socket.gethostname()}): "
    assert f"{who}{there}/runs0 is not the directory that rank 0" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_port_that_is_taken(project: Path, there: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        [(code, _, said)] = ended(by_hand(project, there, 0, 2, port, DDP_RUN__ID="try"))
    assert code == 78, said
    assert f"port 127.0.0.1:{port} is in use already" in said
    assert outcome(there)["exit_code"] == 78


@pytest.mark.slow
def test_a_master_that_is_another_host(project: Path, there: Path) -> None:
    [(code, _, said)] = ended(by_hand(project, there, 0, 2, free_port(), MASTER_ADDR="198.51.100.7"))
    assert code == 78, said
    assert "MASTER_ADDR=198.51.100.7" in said


@pytest.mark.slow  # `make test-more` runs it
def test_a_rank_that_never_comes_is_named_and_what_the_others_found_is_said(project: Path, there: Path) -> None:
    short = {"DDP_CLOCKS__PREFLIGHT_S": "8", "DDP_RUN__ID": "try"}
    [(code, _, said)] = ended(by_hand(project, there, 0, 2, free_port(), **short))
    assert code == 70, said
    assert "rank 0" in said
    assert "ranks [1] did not start within 8 s" in said
    assert (outcome(there)["exit_code"], outcome(there)["kind"]) == (70, "rendezvous_failed")
    wrong = {"DDP_CLOCKS__PREFLIGHT_S": "4", "GLOO_SOCKET_IFNAME": "none9"}
    [(code, _, said)] = ended(by_hand(project, there, 0, 2, free_port(), **wrong))
    assert code == 78, said
    assert "ranks [1] did not start" in said
    assert f"problem: rank 0 ({socket.gethostname()}): GLOO_SOCKET_IFNAME names none9" in said


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_stack(project: Path, there: Path) -> None:
    port, short = free_port(), {"DDP_CLOCKS__PREFLIGHT_S": "6"}
    faults = {"DDP_FAULTS": "stop@rank=1,phase=agree"}
    ranks = [by_hand(project, there, rank, 3, port, **short, **faults) for rank in range(3)]
    try:
        results = [(ranks[number].communicate(timeout=60), ranks[number].returncode) for number in (0, 2)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for (_, said), code in results:
        assert code == 70, said
        assert f"rank 1 ({socket.gethostname()}) did not answer" in said
        assert "looking for the others' files in the run directory" in said
        assert "broadcast_object_list" in said, "the stack of the main thread"


def test_a_signal_ends_it_with_75_also_where_the_launcher_ignores_it(project: Path, there: Path) -> None:
    ignoring = ["bash", "-c", f"trap '' TERM USR2; exec {sys.executable} \"$@\"", "bash", *PREFLIGHT]
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    given |= {"MASTER_PORT": str(free_port()), "DDP_RUN__ID": "try"}
    rank = subprocess.Popen(ignoring, cwd=there, env=environment(project, **given), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    with rank:
        while rank.poll() is None and time.monotonic() < deadline:
            handled = Path(f"/proc/{rank.pid}/status").read_text().partition("SigCgt:\t")[2].split()
            if handled and int(handled[0], 16) >> (signal.SIGUSR2 - 1) & 1:
                rank.send_signal(signal.SIGUSR2)
                break
            time.sleep(0.05)
        _, said = rank.communicate(timeout=30)
    assert rank.returncode == 75, said
    assert "asked to stop: signal SIGUSR2" in said
    assert outcome(there)["restart"] is True


@pytest.mark.slow
def test_two_hosts_of_two_ranks(project: Path, there: Path) -> None:
    """Two names of one host: groups of nodes, and one rank a node for the pairs of nodes."""
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root, for names of hosts")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.7", 9))
        except OSError:
            pytest.skip("needs a network interface")
        address = probe.getsockname()[0]
    name = next(one.split()[1] for one in output("ip", "-o", "address", "show", "to", address).splitlines())
    port, started = free_port(), []
    for rank in range(4):
        given = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
        given |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": name}
        command = [
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname n{rank // 2}; exec "$@"',
            "sh",
            sys.executable,
            *PREFLIGHT,
        ]
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=there, env=environment(project, **given), **piped))
    results = ended(*started)
    assert [code for code, *_ in results] == [0] * 4, results
    said = results[0][1]
    assert all(f"\nall_reduce  {who} " in said for who in ("ranks 0-3 (n0, n1)", "ranks 0-1 (n0)", "ranks 2-3 (n1)")), (
        said
    )
    pairs = ["rank 0 (n0) - rank 1 (n0)", "rank 2 (n1) - rank 3 (n1)", "rank 0 (n0) - rank 2 (n1)"]
    assert all(f"\nboth ways   {pair} " in said for pair in pairs), said
    assert said.count("both ways") == 3, "nodes are measured through their first ranks"
    assert "slowest pair of nodes: rank 0 (n0) - rank 2 (n1), " in said
    assert "clocks: at most " in said


# -------------------------------------------------------------------------------------------------- the pure parts


def row(rank: int, host: str, **changes: Any) -> dict[str, Any]:
    versions = {"torch": "2.13.0", "toolkit": "CUDA 13.0", "NCCL": "2.28.9"}
    return {"rank": rank, "host": host, "device": "H100", "gpu_id": f"{host}{rank}", "versions": versions, **changes}


def test_unequal_versions_and_devices_are_found(part: Part) -> None:
    differences = part("preflight.compare").differences
    rows = [row(0, "n1"), row(1, "n1"), row(2, "n2"), row(3, "n2")]
    assert differences(rows) == []
    rows[3]["versions"] = {**rows[3]["versions"], "torch": "2.12.1", "NCCL": "2.27.5"}
    torch, nccl = differences(rows)
    assert torch.what == "versions of torch differ: 2.12.1 on rank 3 (n2); 2.13.0 on ranks 0-2 (n1, n2)"
    assert nccl.what.startswith("versions of NCCL differ: 2.27.5 on rank 3 (n2)")
    assert torch.blocks
    [devices] = differences([row(0, "n1"), row(1, "n2", device="A100")])
    assert (devices.what, devices.blocks) == ("devices differ: H100 on rank 0 (n1); A100 on rank 1 (n2)", False)
    [devices] = differences([row(0, "n1"), row(1, "n2", device="CPU")])
    assert devices.blocks, "one would use NCCL and the other gloo"
    [same] = differences([row(0, "n1", gpu_id="x"), row(1, "n1", gpu_id="x"), row(2, "n2", gpu_id="x")])
    assert same.what == "ranks 0-1 on n1 have the same GPU, which NCCL refuses"


def test_clocks_that_are_apart_are_found(part: Part) -> None:
    [found] = part("preflight.compare").clocks({"n2": -4.9, "n3": 61.0}, "n1")
    assert found.what == "the clock of n3 is 61.0 s ahead of n1's"


def test_the_slowest_pair_is_named_with_its_ratio(part: Part) -> None:
    compare, link = part("preflight.compare"), part("preflight.links").Link
    hosts = ("n1", "n2", "n3")
    speeds = {(0, 1): 20.0, (0, 2): 5.0, (1, 2): 21.0}
    links = [link("nodes", ranks, 64, speed, 0.02) for ranks, speed in speeds.items()]
    [worst] = compare.slowest(links)
    assert (worst.link.ranks, worst.ratio, worst.of) == ((0, 2), 4.0, 3)
    [warning] = compare.slow(links, hosts)
    assert warning.warning
    assert warning.what == "rank 0 (n1) - rank 2 (n3) takes 4.0 times as long as the median of 3 alike"
    [far] = compare.slow([link("nodes", (0, 1), 64, 1.0, 200.0)], hosts)
    assert far.what == "rank 0 (n1) - rank 1 (n2): 200 ms for one number"


def test_tcp_beside_an_active_adapter_is_a_warning(part: Part) -> None:
    compare, link = part("preflight.compare"), part("preflight.links").Link
    rows = [row(0, "n1", ib="1 ACTIVE of 1, InfiniBand 200 Gb/sec"), row(1, "n2", ib="1 ACTIVE of 1, InfiniBand")]
    slow, quick = (link("nodes", (0, 1), 64, 1.0, 0.1, *how) for how in (("eth0 (TCP)", False), ("mlx5_0", True)))
    [found] = compare.tcp_beside_adapters([slow], rows, ("n1", "n2"))
    assert "through eth0 (TCP)" in found.what
    assert compare.tcp_beside_adapters([quick], rows, ("n1", "n2")) == []
    rows[1]["ib"] = "-"
    assert compare.tcp_beside_adapters([slow], rows, ("n1", "n2")) == []


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_in_a_tournament_everyone_meets_everyone_once(part: Part, size: int) -> None:
    members = list(range(10, 10 + size))
    rounds = part("preflight.links").tournament(members)
    for pairs in rounds:
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len(set(busy))
    met = sorted(pair for pairs in rounds for pair in pairs)
    assert met == [(a, b) for a in members for b in members if a < b]


@pytest.mark.parametrize(
    ("setting", "taken"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("^lo,docker", ["eth0", "eth1", "ib0"]),
        ("^=eth0", ["lo", "eth1", "ib0", "docker0"]),
        ("ib,eth1", ["eth1", "ib0"]),
        ("=eth", []),
    ],
)
def test_interfaces_are_taken_as_nccl_takes_them(part: Part, setting: str, taken: list[str]) -> None:
    assert part("start.network").selected(setting, ["lo", "eth0", "eth1", "ib0", "docker0"]) == taken


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"NCCL_SOCKET_IFNAME": "^lo", "GLOO_SOCKET_IFNAME": "eth0"}, None),
        ({"NCCL_SOCKET_IFNAME": "hsn", "GLOO_SOCKET_IFNAME": "eth0"}, "NCCL_SOCKET_IFNAME=hsn: matches no interface"),
        ({"NCCL_SOCKET_IFNAME": "=ib0", "GLOO_SOCKET_IFNAME": "eth0"}, "=ib0: ib0 is down, or has no address"),
        ({"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "eth0"}, "lo leads to no other node"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "GLOO_SOCKET_IFNAME names eth, which is no interface"),
        ({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, "ib0 is down, or has no address"),
    ],
)
def test_interfaces_that_will_not_do(part: Part, variables: dict[str, str], says: str | None) -> None:
    network = part("start.network")
    known = {
        "lo": network.Interface("lo", True, ("127.0.0.1",)),
        "eth0": network.Interface("eth0", True, ("10.0.0.1",)),
        "ib0": network.Interface("ib0", False, ()),
    }
    found = network.check_interfaces(known, several_nodes=True, nccl=True, environ=variables)
    assert [says in one.what for one in found] == ([True] if says else [])
    assert all(one.blocks for one in found)


@pytest.mark.parametrize(
    ("variables", "files", "missing"),
    [
        ({}, [], ""),
        ({"NCCL_NET": "socket"}, [], ""),
        ({"NCCL_NET": "IB"}, [], ""),
        ({"NCCL_NET": "AWS Libfabric"}, [], "libnccl-net*.so*"),
        ({"NCCL_NET": "AWS Libfabric"}, ["libnccl-net.so"], ""),
        ({"NCCL_NET": "AWS Libfabric"}, ["librccl-net.so.0"], ""),
        ({"NCCL_NET": "gIB", "NCCL_NET_PLUGIN": "gib"}, ["libnccl-net.so"], "libnccl-net-gib.so"),
        ({"NCCL_NET": "gIB", "NCCL_NET_PLUGIN": "gib"}, ["libnccl-net-gib.so"], ""),
        ({"NCCL_NET": "gIB", "NCCL_NET_PLUGIN": "a,libmine.so"}, ["libmine.so"], ""),
        ({"NCCL_NET": "gIB", "NCCL_NET_PLUGIN": "STATIC_PLUGIN"}, [], ""),
        ({"NCCL_NET": "gIB", "NCCL_NET_PLUGIN": "none"}, ["libnccl-net.so"], "NCCL_NET_PLUGIN=none"),
        ({"NCCL_NET": "gIB", "NCCL_NET_PLUGIN": "/nowhere/libnccl-net.so"}, [], "/nowhere/libnccl-net.so"),
    ],
)
def test_a_plugin_that_is_forced_must_be_there(
    part: Part, tmp_path: Path, variables: dict[str, str], files: list[str], missing: str
) -> None:
    for file in files:
        (tmp_path / file).touch()
    variables = {"LD_LIBRARY_PATH": f"/elsewhere:{tmp_path}", **variables}
    found = part("start.plugin").check_plugin(variables, tmp_path / "no-cache")
    assert len(found) == bool(missing)
    for finding in found:
        assert missing in finding.what
        assert "NCCL_NET=Socket" in finding.remedy or "unset one" in finding.remedy
        assert "NCCL_NET_PLUGIN=none" in finding.what or f"/elsewhere:{tmp_path}:" in finding.what


def test_a_plugin_is_looked_for_as_the_loader_does(part: Part, tmp_path: Path) -> None:
    plugin = part("start.plugin")
    forced, cache = {"NCCL_NET": "OFI"}, tmp_path / "ld.so.cache"
    cache.write_bytes(b"glibc-ld.so.cache1.1\0libfabric.so.1\0/opt/fabric/lib/libfabric.so.1\0")
    assert len(plugin.check_plugin(forced, cache)) == 1
    cache.write_bytes(b"glibc-ld.so.cache1.1\0libnccl-net.so\0/opt/ofi/lib/libnccl-net.so\0")
    assert plugin.check_plugin(forced, cache) == []
    # NCCL of a wheel, or linked into torch: what it opens may lie beside it.
    beside = tmp_path / "site-packages/nvidia/nccl/lib"
    beside.mkdir(parents=True)
    maps = tmp_path / "maps"
    maps.write_text(
        f"7f00-7f01 r-xp 00000000 08:01 42    {tmp_path}/site-packages/torch/lib/libtorch_cuda.so\n7f02 rw\n"
    )
    assert plugin._of_callers(maps) == [f"{tmp_path}/site-packages/torch/lib", str(beside)]


def test_a_job_without_its_plugin_ends_before_nccl(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, errors = part("start.groups"), part("errors")
    monkeypatch.setattr(groups, "choose_device", lambda place, wanted: groups.torch.device("cuda", 0))
    monkeypatch.setattr(groups.torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("NCCL_NET", "AWS Libfabric")
    job = SimpleNamespace(place=SimpleNamespace(world_size=2, who="rank 1 (n2)"), clocks=None)
    with pytest.raises(
        errors.ConfigError, match=r"rank 1 \(n2\): NCCL_NET=AWS Libfabric names a network plugin, and no"
    ):
        groups.setup_distributed(job)


@pytest.mark.parametrize(
    ("cuda", "served", "gpus", "said"),
    [
        ("13.0", (12, 4), 1, ["CUDA 12.4", "torch 2.13.0", "CUDA 13.0", "driver 580 or later", "/whl/cu126"]),
        ("13.2", (12, 8), 8, ["CUDA 12.8", "driver 580 or later", "/whl/cu126", "run.device"]),
        ("12.6", (11, 4), 1, ["CUDA 11.4", "driver 525 or later", "have the driver updated"]),
        ("13.0", (11, 4), 1, ["driver 580 or later", "have the driver updated"]),
        ("13.2", (13, 0), 1, []),  # the same CUDA: any minor release runs
        ("12.6", (12, 2), 1, []),
        ("12.6", (13, 0), 1, []),
        ("13.0", (12, 4), 0, []),  # a login node may have the library, without a GPU
        (None, (12, 4), 1, []),  # built for CPUs, or for ROCm
    ],
)
def test_a_driver_that_is_too_old_for_torch_is_named_with_the_build_that_it_runs(
    part: Part, tmp_path: Path, cuda: str | None, served: tuple[int, int], gpus: int, said: list[str]
) -> None:
    for number in range(gpus):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    found = part("start.driver").check_driver("2.13.0", cuda, served, tmp_path)
    assert (found is not None) == bool(said)
    for text in said:
        assert text in f"{found.what}\n{found.remedy}"


@pytest.mark.parametrize(("number", "newest"), [(12040, (12, 4)), (13020, (13, 2)), (0, None)])
def test_the_drivers_library_says_which_cuda_it_serves(
    part: Part, monkeypatch: pytest.MonkeyPatch, number: int, newest: tuple[int, int] | None
) -> None:
    driver = part("start.driver")

    def cu_driver_get_version(reference: Any) -> int:
        reference._obj.value = number
        return 0

    library = SimpleNamespace(cuDriverGetVersion=cu_driver_get_version)
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: library)
    assert driver.newest_cuda() == newest


def test_training_does_not_go_on_on_the_cpu_under_a_driver_that_is_too_old(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, errors, findings = part("start.groups"), part("errors"), part("start.findings")
    old = findings.Finding("its NVIDIA driver 550.163.01 is for CUDA 12.4, and torch ...", "install ...", blocks=True)
    monkeypatch.setattr(groups, "check_driver", lambda torch, cuda: old)
    for name in groups.VISIBLE:
        monkeypatch.delenv(name, raising=False)
    place = SimpleNamespace(host="n2", rank=1, local_rank=1, local_world_size=2, launcher="torchrun")
    for wanted in ("auto", "cuda"):
        with pytest.raises(errors.ConfigError, match=r"^its NVIDIA driver 550\.163\.01 is for CUDA 12\.4"):
            groups.choose_device(place, wanted)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # of Slurm, and not what is wrong
    with pytest.raises(errors.ConfigError, match="its NVIDIA driver"):
        groups.choose_device(place, "auto")
    assert groups.choose_device(place, "cpu").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert groups.choose_device(place, "auto").type == "cpu"


def test_adapters_are_read_from_the_kernel(part: Part, tmp_path: Path) -> None:
    adapters = part("preflight.adapters")
    for name, state, sent in (("mlx5_0", "4: ACTIVE", 100), ("mlx5_1", "1: DOWN", 0)):
        port = tmp_path / "infiniband" / name / "ports" / "1"
        (port / "counters").mkdir(parents=True)
        for file, content in (("state", state), ("link_layer", "InfiniBand"), ("rate", "200 Gb/sec (4X HDR)")):
            (port / file).write_text(content + "\n")
        (port / "counters" / "port_xmit_data").write_text(f"{sent}\n")
    table = tmp_path / "dev"
    line = "{:>6}: 1 2 3 4 5 6 7 8 {} 10 11 12 13 14 15 16\n"
    table.write_text("head\nhead\n" + line.format("lo", 9) + line.format("ib0", 5))
    known = adapters.adapters(tmp_path)
    assert [(one.name, one.active, one.sent) for one in known] == [("mlx5_0", True, 400), ("mlx5_1", False, 0)]

    def check(**variables: str) -> Any:
        return adapters.check_adapters(known, True, True, variables)

    assert check() == ("1 ACTIVE of 2, InfiniBand 200 Gb/sec", [])
    assert "NCCL_IB_HCA=mlx5_1 takes is ACTIVE" in check(NCCL_IB_HCA="mlx5_1")[1][0].what
    assert check(NCCL_IB_HCA="=mlx5_0:1")[1] == []
    assert len(check(NCCL_IB_HCA="=mlx5_0:2")[1]) == 1
    assert check(NCCL_IB_HCA="^mlx5_1")[1] == []
    down = [one for one in known if not one.active]
    assert len(adapters.check_adapters(down, True, True, {})[1]) == 1
    assert adapters.check_adapters(down, True, True, {"NCCL_IB_DISABLE": "1"})[1] == []
    assert adapters.check_adapters(down, False, True, {})[1] == [], "inside one node NCCL needs none"
    assert adapters.check_adapters([], True, True, {}) == ("-", [])

    before, sent = adapters.counts(tmp_path, table), 64 << 20
    assert before.interfaces == {"ib0": 5}
    assert adapters.carrier(before, before, sent) == ("?", None)
    (tmp_path / "infiniband/mlx5_0/ports/1/counters/port_xmit_data").write_text(str(100 + sent // 4))
    assert adapters.carrier(before, adapters.counts(tmp_path, table), sent) == ("mlx5_0", True)
    table.write_text(table.read_text().replace(" 5 10", f" {5 + sent} 10"))
    assert adapters.carrier(before, adapters.counts(tmp_path, table), sent) == ("ib0 (TCP)", False), (
        "TCP over InfiniBand"
    )
    assert adapters.carrier(before, adapters.counts(tmp_path, table), 1 << 20) == ("?", None), "too few bytes to tell"


def test_copies_that_arrive_changed_are_found(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors stand in for those of GPUs."""
    import torch

    peers = part("preflight.gpu_copies")
    monkeypatch.setattr(peers, "_gpu", lambda number: f"cpu:{number}")
    monkeypatch.setattr(peers, "_wait", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (2, 0))
    words, found = peers.copies(3, {})
    assert words.startswith("5 of 6 pairs, ")
    assert found == []
    assert peers.copies(3, {"NCCL_P2P_DISABLE": "1"}) == ("off (NCCL_P2P_DISABLE)", [])
    assert peers.copies(1, {}) == ("-", [])
    copy = torch.Tensor.copy_
    made: list[int] = []

    def broken(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        made.append(1)
        return copy(target, source + (len(made) > 2))  # two copies for each pair

    monkeypatch.setattr(torch.Tensor, "copy_", broken)
    _, found = peers.copies(2, {})
    assert [one.what.partition(" arrive")[0] for one in found] == ["data copied from GPU 1 to GPU 0"]
    assert found[0].blocks


@pytest.mark.parametrize("changed", [0, 1])
def test_transfers_that_arrive_changed_are_found(part: Part, monkeypatch: pytest.MonkeyPatch, changed: int) -> None:
    import torch

    links = part("preflight.links")

    def deliver(ops: list[Any]) -> list[Any]:
        (_, out, peer), (_, into, _) = ops
        into.copy_(out + (peer - job.rank))  # the other rank's numbers
        into[-1] += changed
        return []

    job = SimpleNamespace(rank=3, device=torch.device("cpu"), who=lambda rank: f"rank {rank}")
    monkeypatch.setattr(links.dist, "P2POp", lambda *parts: parts)
    monkeypatch.setattr(links.dist, "batch_isend_irecv", deliver)
    measured, found = [], []
    assert links._pairs(job, "nodes", [0, 3], 1 << 20, lambda _: None, measured, found)
    assert [link.ranks for link in measured] == [(0, 3)]
    assert [one.what for one in found] == [
        "data from rank 0 arrive changed at rank 3: the transport is broken"
    ] * changed
    members = list(range(40))
    assert not links._pairs(job, "nodes", members, 1 << 10, lambda _: None, measured, found), "16 rounds of 39"
    assert len(measured) == 1 + links.MOST_ROUNDS


def test_who_did_not_answer_is_told_apart_from_who_waits(part: Part) -> None:
    said = part("preflight.deadline").verdict("late", ["in x", None, "in x", "in y"], ("n1", "n1", "n2", "n2"))
    assert said.splitlines() == [
        "late",
        "  rank 1 (n1) did not answer: dead, suspended, or cut off",
        "  ranks 0, 2 (n1, n2): in x",
        "  rank 3 (n2): in y",
    ]


def test_many_ranks_are_shown_by_host(part: Part) -> None:
    machines, columns = part("preflight.tables").machines, part("preflight.tables").COLUMNS
    rows = [{**dict.fromkeys(columns, 4), "rank": rank, "host": f"n{rank // 8}", "cpus": rank} for rank in range(24)]
    shown = machines(rows)
    cpus = shown[0].index("cpus")
    assert [(line[0], line[1], line[cpus]) for line in shown[1:]] == [
        ("0-7", "n0", "0-7"),
        ("8-15", "n1", "8-15"),
        ("16-23", "n2", "16-23"),
    ]


def test_versions_of_nccl_are_decoded(part: Part) -> None:
    dotted = part("preflight.machine")._dotted
    assert [dotted(number) for number in (22705, 22809, 2804)] == ["2.27.5", "2.28.9", "2.8.4"]


def test_only_preflights_own_arguments_are_kept(part: Part) -> None:
    words = [
        "--train.steps",
        "5",
        "--run.id=x",
        "--clocks.init_s",
        "9",
        "--model.width=3",
        "--config",
        "a.yaml",
        "--json",
    ]
    kept = ["--run.id=x", "--clocks.init_s", "9", "--config", "a.yaml"]
    assert part("preflight.__main__").ours(words) == kept
