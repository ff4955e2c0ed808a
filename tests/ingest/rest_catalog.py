"""A REST catalog of Iceberg, in this process, on top of an SQLite one: as much of it as the job asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import CommitTableRequest, Table

ERRORS = {
    CommitFailedException: 409,
    NamespaceAlreadyExistsError: 409,
    TableAlreadyExistsError: 409,
    NoSuchTableError: 404,
}


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URI of a catalog whose tables are in the folder."""
    catalog = SqlCatalog("rest", uri=f"sqlite:///{folder}/rest.db", warehouse=folder.as_uri())
    one_at_a_time = Lock()

    def answer(method: str, path: str, body: bytes) -> Any:
        match method, path.strip("/").split("/")[1:]:
            case "GET", ["config"]:
                return {"defaults": {}, "overrides": {}}
            case "POST", ["namespaces"]:
                catalog.create_namespace(tuple(json.loads(body)["namespace"]))
                return json.loads(body)
            case "GET", ["namespaces", namespace]:
                return {"namespace": [namespace], "properties": {}}
            case "POST", ["namespaces", namespace, "tables"]:
                wanted = CreateTableRequest.model_validate({"location": None} | json.loads(body))
                made = catalog.create_table(
                    (namespace, wanted.name),
                    wanted.table_schema,
                    wanted.location,
                    wanted.partition_spec,  # type: ignore[arg-type]
                    properties=wanted.properties,
                )
                return described(made)
            case "GET", ["namespaces", namespace, "tables", name]:
                return described(catalog.load_table((namespace, name)))
            case "POST", ["namespaces", namespace, "tables", name]:
                change = CommitTableRequest.model_validate_json(body)
                table = catalog.load_table((namespace, name))
                catalog.commit_table(table, change.requirements, change.updates)
                return described(catalog.load_table((namespace, name)))
        raise NotImplementedError(f"{method} {path}")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                with one_at_a_time:
                    code, content = 200, answer(self.command, self.path.partition("?")[0], body)
            except tuple(ERRORS) as error:
                code = ERRORS[type(error)]
                content = {"error": {"message": str(error), "type": type(error).__name__, "code": code}}
            data = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def described(table: Table) -> dict[str, Any]:
    metadata = json.loads(table.metadata.model_dump_json())
    return {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}
