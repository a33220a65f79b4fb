"""Push and annotate against a contract server: nothing twice, no token in sight, an end within the deadline."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Response

from sentinel.cli import grafana, main
from sentinel.cli.dashboards import note_of
from sentinel.cli.grafana import Change, Note, Server, annotate, push, read_token
from sentinel.errors import MisuseError, PermanentError, TemporaryError
from tests.dashboards import expressions
from tests.dashboards.grafana_contract import TOKEN, GrafanaContract

PAGES = list(expressions.pages().values())
UIDS = ["sentinel-run", "sentinel-machine", "sentinel-itself"]


@pytest.fixture
def contract(httpserver: HTTPServer) -> GrafanaContract:
    return GrafanaContract(httpserver)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


def server_of(contract: GrafanaContract) -> Server:
    return Server(contract.url, TOKEN)


def note(**changes: Any) -> Note:
    return Note("i-1", "run 1/a", 1000, 1000, "loss_spike at step 7", ("loss_spike", "critical"))._replace(**changes)


# ---------------------------------------------------------------- push


def test_a_second_push_changes_nothing(contract: GrafanaContract) -> None:
    assert push(server_of(contract), PAGES, "Training") == dict.fromkeys(UIDS, Change.CREATED)
    writes = contract.writes
    assert push(server_of(contract), PAGES, "Training") == dict.fromkeys(UIDS, Change.UNCHANGED)
    assert contract.writes == writes == 1 + len(UIDS)
    assert [folder["title"] for folder in contract.folders] == ["Training"]
    assert sorted(contract.dashboards) == sorted(UIDS)


def test_what_somebody_changed_is_put_right(contract: GrafanaContract) -> None:
    push(server_of(contract), PAGES, "sentinel")
    contract.dashboards["sentinel-run"]["dashboard"]["title"] = "mine"
    changes = push(server_of(contract), PAGES, "sentinel")
    assert changes == dict.fromkeys(UIDS, Change.UNCHANGED) | {"sentinel-run": Change.UPDATED}
    stored = contract.dashboards["sentinel-run"]["dashboard"]
    assert (stored["title"], stored["id"], stored["version"]) == ("sentinel: run", 1, 2)


def test_another_folder_moves_the_dashboards(contract: GrafanaContract) -> None:
    push(server_of(contract), PAGES, "one")
    assert push(server_of(contract), PAGES, "two") == dict.fromkeys(UIDS, Change.UPDATED)
    uid = next(folder["uid"] for folder in contract.folders if folder["title"] == "two")
    assert {found["meta"]["folderUid"] for found in contract.dashboards.values()} == {uid}


def test_a_folder_that_is_there_is_used(contract: GrafanaContract) -> None:
    contract.folders.append({"id": 1, "uid": "by-hand", "title": "Training"})
    push(server_of(contract), PAGES, "Training")
    assert len(contract.folders) == 1
    assert contract.dashboards["sentinel-run"]["meta"]["folderUid"] == "by-hand"


# ---------------------------------------------------------------- annotate


def test_a_second_annotation_changes_nothing(contract: GrafanaContract) -> None:
    assert annotate(server_of(contract), [note()]) == {"i-1": Change.CREATED}
    assert annotate(server_of(contract), [note()]) == {"i-1": Change.UNCHANGED}
    (stored,) = contract.annotations
    assert stored["tags"] == ["sentinel", "run 1/a", "i-1", "loss_spike", "critical"]
    assert contract.writes == 1


def test_an_incident_that_ended_changes_its_annotation(contract: GrafanaContract) -> None:
    annotate(server_of(contract), [note()])
    assert annotate(server_of(contract), [note(end_ms=5000), note(key="i-2")]) == {
        "i-1": Change.UPDATED,
        "i-2": Change.CREATED,
    }
    assert [(row["time"], row["timeEnd"]) for row in contract.annotations] == [(1000, 5000), (1000, 1000)]


def test_the_same_incident_id_of_another_run_is_another_annotation(contract: GrafanaContract) -> None:
    annotate(server_of(contract), [note()])
    assert annotate(server_of(contract), [note(run_id="b")]) == {"i-1": Change.CREATED}
    assert len(contract.annotations) == 2


def test_a_run_without_incidents_asks_nothing(contract: GrafanaContract) -> None:
    assert annotate(Server("http://127.0.0.1:9", TOKEN), []) == {}


def test_a_note_says_what_happened_and_what_was_done() -> None:
    incident = {"id": "i", "run_id": "r", "kind": "loss_spike", "severity": "critical", "first_step": 7}
    incident |= {"summary": "loss 9 > 3 & rising", "opened_at": 1.5, "resolved_at": None}
    actions = [{"action": "none", "outcome": None}, {"action": "rollback", "outcome": "applied"}]
    made = note_of(incident, actions)
    assert made.text == "loss_spike at step 7: loss 9 &gt; 3 &amp; rising -&gt; rollback applied"
    assert (made.start_ms, made.end_ms) == (1500, 1500)
    assert note_of({**incident, "resolved_at": 2.0}, []).end_ms == 2000


# ---------------------------------------------------------------- the command


def test_the_command_pushes_and_says_what_it_did(
    contract: GrafanaContract, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["dashboards", "push", "--url", contract.url, "--token-file", str(token_file), "--json"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"folder": "sentinel", "changes": dict.fromkeys(UIDS, "created")}
    assert main(words[:-1]) == 0
    assert capsys.readouterr().out.splitlines() == [f"unchanged  {uid}" for uid in UIDS]


def test_a_wrong_token_is_an_error_that_does_not_show_it(
    contract: GrafanaContract, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token_file.write_text("glsa_wrong-secret")
    assert main(["dashboards", "push", "--url", contract.url, "--token-file", str(token_file)]) == 1
    said = capsys.readouterr()
    assert "refuses the token (401)" in said.err
    assert "wrong-secret" not in said.err + said.out
    assert contract.dashboards == {}


@pytest.mark.parametrize("text", ["", "two words", "one\ntwo", "umlautÄ"])
def test_a_file_that_is_no_token_is_refused_and_not_shown(text: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(MisuseError, match="must hold one token") as refused:
        read_token(path)
    assert text == "" or text not in str(refused.value)


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="No such file"):
        read_token(tmp_path / "nothing")


@pytest.mark.parametrize(
    "url",
    ["localhost:3000", "ftp://host", "http://", "http://host/?a=b", "http://host/#x", "http://[a", "http://a:b"],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(MisuseError, match="it must be like"):
        Server(url, TOKEN)


def test_a_url_with_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(MisuseError) as refused:
        Server("http://admin:hush@host", TOKEN)
    assert "hush" not in str(refused.value)
    assert TOKEN not in repr(Server("http://host", TOKEN))


# ---------------------------------------------------------------- servers that misbehave


def refused_by(httpserver: HTTPServer, **more: Any) -> Exception:
    with pytest.raises((PermanentError, TemporaryError)) as refused:
        push(Server(httpserver.url_for("/"), TOKEN, **more), PAGES, "sentinel")
    assert TOKEN not in str(refused.value)
    return refused.value


def test_a_redirect_is_not_followed(httpserver: HTTPServer) -> None:
    elsewhere = Response(status=302, headers={"Location": httpserver.url_for("/elsewhere")})
    httpserver.expect_request("/api/folders").respond_with_response(elsewhere)
    httpserver.expect_request("/elsewhere").respond_with_json([])
    assert "redirects elsewhere" in str(refused_by(httpserver))
    assert [request.path for request, _ in httpserver.log] == ["/api/folders"]


def test_a_server_error_is_temporary_and_an_echoed_token_is_hidden(httpserver: HTTPServer) -> None:
    httpserver.expect_request("/api/folders").respond_with_json({"message": f"bad {TOKEN}"}, status=503)
    error = refused_by(httpserver)
    assert isinstance(error, TemporaryError)
    assert "bad ***" in str(error)


@pytest.mark.parametrize("answer", ["<html>login</html>", '{"surprise": 1}', '["x"]'])
def test_what_is_not_grafana_is_said_so(answer: str, httpserver: HTTPServer) -> None:
    httpserver.expect_request("/api/folders").respond_with_data(answer)
    assert "does not answer as Grafana does" in str(refused_by(httpserver))


def test_an_answer_without_end_is_cut(httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grafana, "MOST_BYTES", 1000)
    httpserver.expect_request("/api/folders").respond_with_data(json.dumps([{"title": "x" * 2000, "uid": "u"}]))
    assert isinstance(refused_by(httpserver), PermanentError)


def test_nobody_there_is_temporary() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(TemporaryError, match="cannot be reached"):
            push(Server(f"http://127.0.0.1:{unused.getsockname()[1]}", TOKEN), PAGES, "sentinel")


@pytest.fixture
def dripping() -> Iterator[str]:
    """The address of a server that sends a byte of its headers every 50 ms, for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()
        thread = threading.Thread(target=_drip, args=(listener, over))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        over.set()
        thread.join(5)


def test_a_dripping_server_holds_nobody_beyond_the_deadline(dripping: str) -> None:
    began = time.monotonic()
    with pytest.raises(TemporaryError, match=r"within 0\.5 s"):
        push(Server(dripping, TOKEN, deadline_seconds=0.5), PAGES, "sentinel")
    assert time.monotonic() - began < 5.0


def _drip(listener: socket.socket, over: threading.Event) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not over.wait(0.05):
            connection.sendall(b"a")
