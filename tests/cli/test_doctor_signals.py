"""`sentinel doctor` lists every signal: how it is had here, or why it is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from sentinel import config, places
from sentinel.cli import doctor_machine, doctor_signals, main
from sentinel.cli.doctor_machine import Found
from sentinel.cli.doctor_signals import Availability, Signal, Torch, installed_torch, read_torch
from sentinel.daemon.probes.nvml import Nvml
from sentinel.places import Places
from tests.daemon.probes.nvml_fake import FakeNvml, gpu

CPU = Torch("2.13.0+cpu")
CUDA = Torch("2.13.0+cu126", "CUDA 12.6")
OF_THE_LOOP = {"loss", "gradient norm", "step split", "sampled histogram", "communication wait, DDP on gloo"}
OF_THE_MACHINE = {"network", "RDMA", "disk", "data workers", "host memory of a rank", *doctor_machine.GPU}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    for name in [name for name in os.environ if name.startswith("SENTINEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SENTINEL_HOME", str(tmp_path / "home"))
    return places.find({}, tmp_path / "home")


def signals(home: Places, torch: Torch = CPU) -> dict[str, Signal]:
    return {signal.name: signal for signal in doctor_signals.find(home, torch)}


def test_json_gives_every_signal_with_status_and_reason(home: Places, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["signals"]
    assert {*OF_THE_LOOP, *OF_THE_MACHINE} <= {signal["name"] for signal in told}
    assert all(signal["status"] in list(Availability) and signal["reason"] for signal in told)
    assert not home.home.exists()


def test_mfu_needs_a_peak_and_the_operations_of_a_step(home: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    assert signals(home)["MFU"].status is Availability.ABSENT
    assert "throughput.peak_flops_per_second" in signals(home)["MFU"].reason
    monkeypatch.setenv("SENTINEL_THROUGHPUT__PEAK_FLOPS_PER_SECOND", "1e12")
    assert "run.report(flops=...)" in signals(home)["MFU"].reason
    monkeypatch.setenv("SENTINEL_THROUGHPUT__FLOPS_PER_TOKEN", "6e9")
    assert signals(home)["MFU"] == Signal("MFU", Availability.AVAILABLE, "from [throughput]")


def test_doctor_does_not_import_torch(home: Places) -> None:
    code = (
        "import sys; from sentinel.cli import main; code = main(['doctor', '--json']); print('torch' in sys.modules)"
    )
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, env={**os.environ}
    )
    assert asked.stdout.splitlines()[-1] == "False"
    assert '"signals"' in asked.stdout


def test_the_names_are_the_same_everywhere(home: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    here = [*signals(home)]
    assert [*signals(home, CUDA)] == here
    assert [*signals(home, Torch())] == here
    monkeypatch.setitem(sys.modules, "structlog", None)
    assert [*signals(home)] == here


def test_without_torch_the_loops_signals_are_absent_and_the_machines_are_not(home: Places) -> None:
    found = signals(home, Torch())
    for name in OF_THE_LOOP:
        assert found[name] == Signal(name, Availability.ABSENT, doctor_signals.NO_TORCH)
    assert found["network"].status is found["disk"].status is Availability.AVAILABLE


def test_a_torch_that_is_too_old_is_told_with_the_remedy(home: Places) -> None:
    old = signals(home, Torch("2.10.1+cpu"))["loss"]
    assert old.status is Availability.ABSENT
    assert "2.10.1" in old.reason
    assert "2.11" in old.reason
    assert signals(home, Torch("2.11.0"))["loss"].status is Availability.AVAILABLE


def test_without_the_daemons_packages_the_machines_signals_say_how_to_get_them(
    home: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "structlog", None)
    found = signals(home)
    assert {found[name].reason for name in OF_THE_MACHINE} == {doctor_machine.NO_DAEMON}
    assert found["loss"].status is Availability.AVAILABLE


def test_how_torch_is_built_is_read_without_importing_it(tmp_path: Path) -> None:
    import torch

    assert installed_torch() == Torch(torch.__version__, f"CUDA {torch.version.cuda}" if torch.version.cuda else "")
    text = "from typing import Optional\n__version__ = '2.12.1+cu128'\ndebug = False\ncuda: Optional[str] = '12.8'\n"
    (tmp_path / "version.py").write_text(f"{text}git_version = 'abc'\nhip: Optional[str] = None\n")
    assert read_torch(tmp_path) == Torch("2.12.1+cu128", "CUDA 12.8")
    (tmp_path / "version.py").write_text("__version__ = '2.12.1'\ncuda: Optional[str] = None\nhip = '6.2'\n")
    assert read_torch(tmp_path) == Torch("2.12.1", "ROCm 6.2")
    assert read_torch(tmp_path / "nothing") == Torch()


def test_device_memory_needs_a_build_and_a_gpu(home: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    def machine(there: bool) -> None:
        gpus = {doctor_machine.ANY_GPU: Found(there, "1 that answers" if there else "NVML does not start: no driver")}
        monkeypatch.setattr(doctor_machine, "read", lambda places: gpus)

    machine(there=True)
    assert signals(home, CUDA)["device memory"].status is Availability.AVAILABLE
    cpu = signals(home, CPU)["device memory"]
    assert (cpu.status, "CPU alone" in cpu.reason) == (Availability.ABSENT, True)
    machine(there=False)
    bare = signals(home, CUDA)["device memory"]
    assert bare.status is Availability.ABSENT
    assert "no driver" in bare.reason


def test_settings_decide_too(home: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_LOSS__CAPTURE", "false")
    monkeypatch.setenv("SENTINEL_SAMPLING__ENABLED", "false")
    found = signals(home)
    assert "run.report" in found["loss"].reason
    assert "loss.capture" in found["loss"].reason
    assert {found[f"sampled {name}"].reason for name in config.SAMPLED} == {"sampling.enabled is false"}
    monkeypatch.setenv("SENTINEL_MODE", "off")
    assert {(signal.status, signal.reason) for signal in signals(home).values()} == {
        (Availability.ABSENT, "mode is off")
    }


def test_settings_that_cannot_be_used_leave_nothing(home: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_HTTP__PRT", "1")
    found = signals(home)["loss"]
    assert found.status is Availability.ABSENT
    assert "http.port" in found.reason


def test_a_gpu_says_which_of_its_signals_it_does_not_know() -> None:
    plain = gpu()
    plain.failing["nvmlDeviceGetTotalEccErrors"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    found = doctor_machine.of_gpus(Nvml(lambda: FakeNvml(plain)))
    assert found["GPU ECC errors"] == Found(False, "Not Supported")
    assert all(known.there for group, known in found.items() if group != "GPU ECC errors")
    assert found[doctor_machine.ANY_GPU].reason.startswith("1 ")


def test_a_driver_without_a_gpu_is_told() -> None:
    assert {*doctor_machine.of_gpus(Nvml(FakeNvml)).values()} == {Found(False, "no NVIDIA GPU here")}


def test_a_probe_that_fails_is_absent_with_what_it_raised(home: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(places: Places) -> dict[str, Found]:
        raise RuntimeError("a kernel of another kind")

    monkeypatch.setitem(doctor_machine.LOOKS, ("network", "TCP retransmits"), broken)
    found = signals(home)
    assert found["network"].status is Availability.ABSENT
    assert "RuntimeError: a kernel of another kind" in found["network"].reason
    assert found["disk"].status is Availability.AVAILABLE
