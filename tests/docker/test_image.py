"""The commands of the Dockerfile give a daemon that starts, says that it is healthy, and has no torch."""

import http.client
import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker import dockerfile
from tests.docker.dockerfile import Image
from tests.store.building import RUN, rolled_back_run
from tests.waiting import until

service = pytest.mark.service


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def container(image: Image, port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """The image's CMD, once it has said that it is ready."""
    environ = image.environ | {"SENTINEL_HTTP__PORT": str(port), "SENTINEL_HTTP__NAMES": '["sentinel"]'}
    log = tmp_path_factory.mktemp("container") / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            image.command("CMD"), cwd=image.folder, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        assert json.loads(line)["url"] == f"http://127.0.0.1:{port}"
        yield process
        process.kill()


def test_it_does_not_run_as_root_and_its_images_are_pinned() -> None:
    user, _, group = dockerfile.only("USER").partition(":")
    assert (int(user), int(group)) > (0, 0)
    images = [each.rest.split()[0] for each in dockerfile.instructions() if each.word == "FROM"]
    assert all(re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", image) for image in images)


@service
def test_no_torch_is_installed(image: Image) -> None:
    listed = image.run(["python", "-m", "pip", "list", "--format", "json"])
    names = {package["name"] for package in json.loads(listed.stdout)}
    assert {"train-sentinel", "sqlalchemy", "psycopg", "starlette"} <= {name.lower() for name in names}
    assert not {name for name in names if re.match(r"(?i)torch|nvidia(?!-ml-py)|triton|numpy", name)}
    assert image.run(["python", "-c", "import torch"]).returncode == 1


@service
def test_the_health_check_passes_while_the_daemon_runs_and_fails_otherwise(
    image: Image, container: subprocess.Popen[str], port: int
) -> None:
    check = image.command("HEALTHCHECK")
    assert image.run(check, SENTINEL_HTTP__PORT="1").returncode != 0
    until(lambda: image.run(check, SENTINEL_HTTP__PORT=str(port)).returncode == 0, 30.0, "the container is healthy")
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
def test_the_commands_work_without_the_repository(image: Image, tmp_path: Path) -> None:
    rolled_back_run(tmp_path).close()
    home = {"SENTINEL_HOME": str(tmp_path)}
    found = image.run(["sentinel", "postmortem", "--json"], **home)
    assert json.loads(found.stdout)["run"]["run_id"] == RUN, found.stderr
    fresh = image.run(["sentinel", "db", "upgrade", "--json"], SENTINEL_HOME=str(tmp_path / "new"))
    assert json.loads(fresh.stdout)["state"] == "current", fresh.stderr
    page = image.run(["sentinel", "postmortem", "--html", str(tmp_path / "page.html")], **home)
    assert page.returncode == 0, page.stderr
    assert "</html>" in (tmp_path / "page.html").read_text(encoding="utf-8")
    made = image.run(["sentinel", "dashboards", "render", "--out", str(tmp_path / "dashboards")], **home)
    assert made.returncode == 0, made.stderr
    assert {"run.json", "sentinel.json", "rules.yml"} <= {path.name for path in (tmp_path / "dashboards").iterdir()}
    source = image.run(["python", "-c", "import sentinel; print(sentinel.__file__)"])
    assert source.stdout.startswith(str(image.folder)), "it is the installed package that was asked"


@service
def test_the_daemon_leaves_on_sigterm(container: subprocess.Popen[str]) -> None:
    container.terminate()
    assert container.wait(20) == 0
