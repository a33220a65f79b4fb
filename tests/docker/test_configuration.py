"""compose.yml and what it mounts: valid for their tools, pinned, on the loopback interface, without secrets."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from sentinel import config
from sentinel.daemon.settings import load
from tests.conftest import require_service
from tests.docker import settings_file
from tests.generated_docs import sections

DOCKER = Path(__file__).parents[2] / "docker"
# Its origin and licence stand in compose-spec.NOTICE.
SCHEMA = json.loads(Path(__file__).with_name("compose-spec.json").read_text(encoding="utf-8"))
VARIABLES = {"SENTINEL_UID": "1000", "SENTINEL_GID": "1000", "SENTINEL_HOME": "/h", "SENTINEL_RUNTIME": "/r"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yml").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def composer() -> list[str]:
    """`docker compose` where Docker has that command, else `docker-compose`."""
    docker = shutil.which("docker")
    if docker and not subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        return [docker, "compose"]
    return [require_service("docker-compose")]


def test_compose_follows_the_specification(compose: dict[str, Any]) -> None:
    wrong = jsonschema.Draft201909Validator(SCHEMA).iter_errors(compose)
    assert [error.message for error in wrong] == []


@pytest.mark.parametrize("wrong", [{"imagee": "x"}, {"ports": "80"}, {"healthcheck": {"every": "1s"}}])
def test_the_schema_refuses_what_is_wrong(compose: dict[str, Any], wrong: dict[str, Any]) -> None:
    services = compose["services"]
    broken = compose | {"services": services | {"sentinel": services["sentinel"] | wrong}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft201909Validator(SCHEMA).validate(broken)


@pytest.mark.service
def test_compose_reads_the_project(composer: list[str]) -> None:
    done = _config(composer, VARIABLES)
    assert (done.returncode, done.stderr) == (0, "")
    read = yaml.safe_load(done.stdout)
    assert set(read["services"]) == {"sentinel", "postgres", "prometheus", "alertmanager", "grafana"}
    assert read["services"]["sentinel"]["user"] == "1000:1000"
    mounted = {volume["target"] for volume in read["services"]["sentinel"]["volumes"] if isinstance(volume, dict)}
    assert {"/h", "/r"} <= mounted


@pytest.mark.service
@pytest.mark.parametrize("name", VARIABLES)
def test_compose_says_which_variable_is_missing_and_how_to_set_it(composer: list[str], name: str) -> None:
    done = _config(composer, {other: value for other, value in VARIABLES.items() if other != name})
    assert done.returncode != 0
    assert "set it to" in done.stderr


def test_every_image_is_pinned(compose: dict[str, Any]) -> None:
    images = [service["image"] for service in compose["services"].values()]
    assert len(images) == 5
    assert all(re.search(r":v?\d+\.\d+", image) for image in images), images


def test_nothing_is_published_beyond_this_machine(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_secrets_are_files_that_are_not_in_the_repository(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|TOKEN|SECRET|STORE__URL", name):
                assert name.endswith("FILE"), name
                assert value.removeprefix("/run/secrets/") in service["secrets"]
    assert all(secret["file"].startswith("./secrets/") for secret in compose["secrets"].values())
    assert "docker/secrets/" in (DOCKER.parent / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_what_is_mounted_from_the_repository_is_there(compose: dict[str, Any]) -> None:
    mounts = _mounts(compose)
    assert {"/etc/sentinel/sentinel.toml", "/etc/prometheus/rules.yml"} <= set(mounts)
    assert [str(path) for path in mounts.values() if not path.exists()] == []


def test_the_settings_of_the_service_are_settings(compose: dict[str, Any]) -> None:
    environ = {name: value for name, value in compose["services"]["sentinel"]["environment"].items() if "__" in name}
    found = load(DOCKER / "sentinel.toml", environ)
    assert (found.http.host, found.http.names) == ("0.0.0.0", ("sentinel",))
    assert found.store.url_file == "/run/secrets/store_url"
    assert found.notify.alertmanager.url == "http://alertmanager:9093"


def test_whoever_is_asked_by_name_is_a_service(compose: dict[str, Any]) -> None:
    texts = [(DOCKER / "prometheus.yml").read_text(encoding="utf-8"), yaml.safe_dump(compose)]
    texts.append(_mounts(compose)["/etc/grafana/provisioning/datasources"].joinpath("sentinel.yml").read_text())
    asked = {name for text in texts for name in re.findall(r"\b([a-z]+):(?:9477|9090|9093|5432)\b", text)}
    assert asked - {"localhost"} <= set(compose["services"])
    assert {"sentinel", "alertmanager", "prometheus"} <= asked


@pytest.mark.service
def test_promtool_accepts_the_configuration(compose: dict[str, Any], tmp_path: Path) -> None:
    text = (DOCKER / "prometheus.yml").read_text(encoding="utf-8")
    rules = "/etc/prometheus/rules.yml"
    assert text.count(f"- {rules}") == 1
    (tmp_path / "prometheus.yml").write_text(text.replace(rules, str(_mounts(compose)[rules].resolve())))
    done = _checked("promtool", "check", "config", str(tmp_path / "prometheus.yml"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"SUCCESS: [1-9]\d* rules found", done.stdout)


@pytest.mark.service
def test_amtool_accepts_the_configuration() -> None:
    done = _checked("amtool", "check-config", str(DOCKER / "alertmanager.yml"))
    assert done.returncode == 0, done.stderr
    assert "1 receivers" in done.stdout


def test_the_settings_file_holds_every_setting_with_its_default() -> None:
    tree = config.read_file(settings_file.FILE)
    assert config.build(tree) == config.Settings() == load(settings_file.FILE, {})
    assert _keys(tree) == {
        f"{title.strip('[]')}.{row.key}".removeprefix("Top level.")
        for title, _, rows in sections(config.Settings, "")
        for row in rows
    }


def test_the_settings_file_is_up_to_date() -> None:
    assert settings_file.FILE.read_text(encoding="utf-8") == settings_file.text(), "run `make docs`"


def _config(composer: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The project with its variables filled in, as YAML. Needs no engine."""
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    line = [*composer, "--file", str(DOCKER / "compose.yml"), "config"]
    return subprocess.run(line, env=environ | variables, capture_output=True, text=True, check=False)


def _keys(tree: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in tree.items():
        found |= _keys(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name}
    return found


def _mounts(compose: dict[str, Any]) -> dict[str, Path]:
    """Target to source of every bind mount that names a path relative to docker/."""
    written = [volume for service in compose["services"].values() for volume in service.get("volumes", ())]
    pairs = [volume.split(":")[:2] for volume in written if isinstance(volume, str) and volume.startswith(".")]
    return {target: DOCKER / source for source, target in pairs}


def _checked(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([require_service(program), *words], capture_output=True, text=True, check=False)
