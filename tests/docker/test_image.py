"""The commands of the Dockerfile give a daemon that starts, says that it is healthy, and has no torch."""

import http.client
import json
import re
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker import dockerfile
from tests.docker.dockerfile import Image
from tests.notify.receiver import Receiver
from tests.store.building import RUN, rolled_back_run
from tests.waiting import until

service = pytest.mark.service
# `sentinel` as it is where only the extras `daemon` and `report` were installed.
WITHOUT_POSTGRES = (
    "python",
    "-c",
    "import sys; sys.modules['psycopg'] = None; from sentinel.cli import main; sys.exit(main())",
)


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def container(image: Image, port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """The image's CMD, once it has said that it is ready."""
    log = tmp_path_factory.mktemp("container") / "log"
    variables = {"SENTINEL_HTTP__PORT": str(port), "SENTINEL_HTTP__NAMES": '["sentinel"]'}
    with image.start(log, variables) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            assert json.loads(line)["url"] == f"http://127.0.0.1:{port}"
            yield process
        finally:
            process.kill()


def test_it_does_not_run_as_root_and_its_images_are_pinned() -> None:
    user, _, group = dockerfile.only("USER").partition(":")
    assert (int(user), int(group)) > (0, 0)
    images = [each.rest.split()[0] for each in dockerfile.instructions() if each.word == "FROM"]
    assert all(re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", image) for image in images)


def test_what_is_built_from_is_there() -> None:
    assert {path.name for path in dockerfile.context()} >= {"sentinel", "hooks", "dashboards", "pyproject.toml"}
    assert [path for path in dockerfile.context() if not path.exists()] == []


@service
def test_the_port_that_is_exposed_is_the_one_it_listens_on(image: Image) -> None:
    printed = image.run(["python", "-c", "import os; print(os.environ['SENTINEL_HTTP__PORT'])"])
    assert printed.stdout.strip() == dockerfile.only("EXPOSE")


@service
def test_it_is_a_user_without_rights_in_a_place_that_it_cannot_change(image: Image) -> None:
    whoami = image.run(["sh", "-c", "id -u; id -g; grep CapEff /proc/self/status"])
    assert whoami.stdout.split() == [*dockerfile.only("USER").split(":"), "CapEff:", "0" * 16]
    packages = image.run(["python", "-c", "import sentinel; print(sentinel.__path__[0])"]).stdout.strip()
    assert packages.startswith(str(image.root))
    assert image.run(["touch", f"{packages}/more.py"]).returncode != 0
    home = image.root / "var" / "lib" / "sentinel"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert image.run(["rmdir", image.run(["mktemp", "-d", "-p", str(home)]).stdout.strip()]).returncode == 0


@service
def test_no_torch_is_installed(image: Image) -> None:
    listed = image.run(["python", "-m", "pip", "list", "--format", "json"])
    names = {package["name"] for package in json.loads(listed.stdout)}
    assert {"train-sentinel", "sqlalchemy", "psycopg", "starlette"} <= {name.lower() for name in names}
    assert not {name for name in names if re.match(r"(?i)torch|nvidia(?!-ml-py)|triton|numpy", name)}
    refused = image.run(["python", "-c", "import torch"])
    assert "No module named 'torch'" in refused.stderr


@service
def test_the_health_check_passes_while_the_daemon_runs_and_fails_otherwise(
    image: Image, container: subprocess.Popen[str], port: int
) -> None:
    check = dockerfile.health()

    def passes(asked: int) -> bool:
        return image.run(check.words, {"SENTINEL_HTTP__PORT": str(asked)}, check.timeout_seconds).returncode == 0

    with socket.create_server(("127.0.0.1", 0)) as nobody:
        unused = nobody.getsockname()[1]
    assert not passes(unused)
    until(lambda: passes(port), check.unhealthy_after_seconds, "the container is healthy")
    assert container.poll() is None


@service
@pytest.mark.parametrize(("host", "status"), [("sentinel:9477", 200), ("127.0.0.1", 200), ("elsewhere.example", 403)])
def test_it_answers_to_the_names_in_its_settings_only(
    container: subprocess.Popen[str], port: int, host: str, status: int
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics", headers={"Host": host})
    assert connection.getresponse().status == status
    connection.close()


@service
def test_commands_ask_the_daemon_in_the_same_container(image: Image, container: subprocess.Popen[str]) -> None:
    assert container.poll() is None
    examined = image.run(["sentinel", "doctor", "--json"])
    found = {check["name"]: check for check in json.loads(examined.stdout)["checks"]}
    assert found["daemon"]["status"] == "ok", examined.stdout


@service
def test_a_run_of_elsewhere_is_explained_without_the_repository(image: Image, tmp_path: Path) -> None:
    rolled_back_run(tmp_path).close()
    home = {"SENTINEL_HOME": str(tmp_path)}
    found = image.run([*WITHOUT_POSTGRES, "postmortem", "--json"], home)
    assert json.loads(found.stdout)["run"]["run_id"] == RUN, found.stderr
    page = image.run([*WITHOUT_POSTGRES, "postmortem", "--html", f"{tmp_path}/page.html"], home)
    assert page.returncode == 0, page.stderr
    assert "</html>" in (tmp_path / "page.html").read_text(encoding="utf-8")


@service
def test_every_other_file_of_the_package_is_in_the_wheel(image: Image, tmp_path: Path) -> None:
    fresh = image.run([*WITHOUT_POSTGRES, "db", "upgrade", "--json"], {"SENTINEL_HOME": str(tmp_path / "new")})
    assert json.loads(fresh.stdout)["state"] == "current", fresh.stderr
    made = image.run([*WITHOUT_POSTGRES, "dashboards", "render", "--out", str(tmp_path / "dashboards")])
    assert made.returncode == 0, made.stderr
    assert {"run.json", "machine.json", "sentinel.json", "rules.yml"} <= {
        path.name for path in (tmp_path / "dashboards").iterdir()
    }


@service
def test_an_alert_of_the_installed_package_arrives(image: Image) -> None:
    with Receiver("ok") as receiver:
        url = {"SENTINEL_NOTIFY__WEBHOOK__URL": receiver.url}
        sent = image.run([*WITHOUT_POSTGRES, "alerts", "test", "webhook", "--json"], url)
    assert json.loads(sent.stdout)["ok"] is True, sent.stderr
    assert [request.json["data"]["run_id"] for request in receiver.received] == ["test"]


@service
def test_the_doctor_finds_the_installed_package_in_order(image: Image, tmp_path: Path) -> None:
    examined = image.run([*WITHOUT_POSTGRES, "doctor", "--json"], {"SENTINEL_HOME": str(tmp_path / "home")})
    checks = json.loads(examined.stdout)["checks"]
    (itself,) = (check["text"] for check in checks if check["name"] == "sentinel")
    assert str(image.root) in itself, "it is the installed package that was asked"
    assert [check for check in checks if check["status"] == "failed"] == []
    assert examined.returncode == 0


@service
def test_the_daemon_leaves_on_the_stop_signal(container: subprocess.Popen[str]) -> None:
    container.send_signal(getattr(signal, dockerfile.only("STOPSIGNAL")))
    assert container.wait(20) == 0
