"""As much of Grafana's HTTP API as a push needs, in memory: answers as the documentation of Grafana says."""

import json
import re
from typing import Any

from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

TOKEN = "glsa_contract-token"  # the form of a service account's token; of this server only


class GrafanaContract:
    """`GrafanaContract(httpserver)` serves below /grafana, as behind a proxy; what was stored can be looked at."""

    def __init__(self, server: HTTPServer) -> None:
        self.url = server.url_for("/grafana").rstrip("/")
        self.folders: list[dict[str, Any]] = []
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.annotations: list[dict[str, Any]] = []
        self.writes = 0
        routes = {
            ("GET", "/folders"): self._get_folders,
            ("POST", "/folders"): self._post_folder,
            ("POST", "/dashboards/db"): self._post_dashboard,
            ("GET", "/annotations"): self._get_annotations,
            ("POST", "/annotations"): self._post_annotation,
        }
        self._routes = routes
        server.expect_request(re.compile("^/grafana/api/")).respond_with_handler(self._answer)

    def _answer(self, request: Request) -> Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _json({"message": "Invalid API key"}, 401)
        path = request.path.removeprefix("/grafana/api")
        self.writes += request.method != "GET"
        if request.method == "GET" and path.startswith("/dashboards/uid/"):
            return self._get_dashboard(path.rpartition("/")[2])
        if request.method == "PUT" and path.startswith("/annotations/"):
            return self._put_annotation(int(path.rpartition("/")[2]), request)
        route = self._routes.get((request.method, path))
        return _json({"message": "Not found"}, 404) if route is None else route(request)

    def _get_folders(self, request: Request) -> Response:
        return _json(self.folders)

    def _post_folder(self, request: Request) -> Response:
        given = _body(request)
        if any(given["uid"] == folder["uid"] for folder in self.folders):
            return _json({"message": "a folder with the same uid already exists"}, 412)
        self.folders.append({"id": len(self.folders) + 1, "uid": given["uid"], "title": given["title"]})
        return _json(self.folders[-1])

    def _get_dashboard(self, uid: str) -> Response:
        found = self.dashboards.get(uid)
        return _json({"message": "Dashboard not found"}, 404) if found is None else _json(found)

    def _post_dashboard(self, request: Request) -> Response:
        given = _body(request)
        page, uid = given["dashboard"], given["dashboard"]["uid"]
        there = self.dashboards.get(uid)
        if there is not None and not given.get("overwrite"):
            return _json(
                {"message": "The dashboard has been changed by someone else", "status": "version-mismatch"}, 412
            )
        if not any(folder["uid"] == given["folderUid"] for folder in self.folders):
            return _json({"message": "folder not found"}, 400)
        version = 1 if there is None else there["dashboard"]["version"] + 1
        number = len(self.dashboards) + 1 if there is None else there["dashboard"]["id"]
        stored = {**page, "id": number, "version": version}
        self.dashboards[uid] = {"dashboard": stored, "meta": {"folderUid": given["folderUid"]}}
        return _json({"id": number, "uid": uid, "version": version, "status": "success"})

    def _get_annotations(self, request: Request) -> Response:
        tags = set(request.args.getlist("tags"))
        found = [row for row in self.annotations if tags <= set(row["tags"])]
        return _json(found[: int(request.args.get("limit", 100))])

    def _post_annotation(self, request: Request) -> Response:
        number = len(self.annotations) + 1
        self.annotations.append({"id": number, **_annotation(request)})
        return _json({"message": "Annotation added", "id": number})

    def _put_annotation(self, number: int, request: Request) -> Response:
        self.annotations[number - 1] = {"id": number, **_annotation(request)}
        return _json({"message": "Annotation updated"})


def _annotation(request: Request) -> dict[str, Any]:
    given = _body(request)
    return {name: given[name] for name in ("time", "timeEnd", "tags", "text")}


def _body(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(request.get_data())
    return body


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value), status, content_type="application/json")
