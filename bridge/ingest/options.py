"""The options that several subcommands of `streambridge ingest` share, each declared once.

A command declares a parameter, and `takes` replaces it with the options of the named function:

    @takes(where=table)
    def report(where: TableOptions) -> None: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bridge.ingest.console import errors
from bridge.ingest.errors import BadOption
from bridge.ingest.session import open_session
from bridge.ingest.table import TableOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Source = Annotated[
    str, typer.Option("--source", help="Where the gateways export to: s3://bucket/prefix or a directory.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


@dataclass(frozen=True, slots=True)
class Spark:
    """The Spark to use: a local master, a Spark Connect server, or what spark-submit provides."""

    master: str | None
    remote: str | None
    verbose: bool

    @contextmanager
    def session(self, app: str) -> Iterator[SparkSession]:
        opened = open_session(self.master, self.remote, app, verbose=self.verbose)
        try:
            yield opened
        finally:
            opened.stop()


def table(
    table: Annotated[str, typer.Option("--table", help="Iceberg table, namespace.table.")] = "lake.messages",
    warehouse: Annotated[
        str | None,
        typer.Option(
            "--warehouse", help="Directory or URL for the tables; a directory gets an SQLite catalog."
        ),
    ] = None,
    catalog: Annotated[
        list[str] | None,
        typer.Option(
            "--catalog", metavar="KEY=VALUE", help="pyiceberg catalog property, repeatable: type=glue"
        ),
    ] = None,
    delta: Annotated[
        str | None, typer.Option("--delta", help="Use the Delta table at this directory or URL instead.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option("--state", help="Where to keep state documents [WAREHOUSE/_streambridge/TABLE]."),
    ] = None,
    endpoint_url: Annotated[
        str | None, typer.Option("--endpoint-url", help="Endpoint of an S3 service other than AWS.")
    ] = None,
) -> TableOptions:
    """Return which table to use, and where; raises BadOption."""
    properties: dict[str, str] = {}
    for text in catalog or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise BadOption(f"--catalog {text}: write it as key=value, such as type=glue")
        properties[key] = value
    return TableOptions(table, warehouse, properties, delta, state, endpoint_url)


def spark(
    master: Annotated[
        str | None, typer.Option("--master", help="Master of a local session [local[*,4]].")
    ] = None,
    remote: Annotated[
        str | None, typer.Option("--remote", help="Spark Connect server, sc://host:port.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the log of a local Spark.")] = False,
) -> Spark:
    """Return which Spark to use."""
    return Spark(master, remote, verbose)


@dataclass(frozen=True, slots=True)
class Typed:
    """How payloads become typed columns."""

    schema: str
    form: str
    streams: tuple[str, ...]
    topic: str


def typed(
    schema: Annotated[
        str,
        typer.Option(
            "--schema", help='Columns as Spark DDL, such as "temp DOUBLE, unit STRING"; or infer; or variant.'
        ),
    ] = "infer",
    form: Annotated[str, typer.Option("--format", help="Format of the payloads: json or cbor.")] = "json",
    stream: Annotated[
        list[str] | None, typer.Option("--stream", help="Only this stream, repeatable [all].")
    ] = None,
    topic: Annotated[
        str,
        typer.Option(
            "--topic",
            metavar="PATTERN",
            help="Only these topics: an MQTT filter, in which {name} is a level that becomes a column [all].",
        ),
    ] = "",
) -> Typed:
    """Return how to type payloads; raises BadOption."""
    if form not in ("json", "cbor"):
        raise BadOption(f"--format {form}: use json or cbor")
    return Typed(schema, form, tuple(stream or ()), topic)


def takes(**makers: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace each named parameter with the options of its maker, which makes the argument from them."""

    def around(command: Callable[..., None]) -> Callable[..., None]:
        options: list[Parameter] = []
        for name, own in signature(command, eval_str=True).parameters.items():
            made = signature(makers[name], eval_str=True).parameters.values() if name in makers else [own]
            options += [option.replace(kind=Parameter.KEYWORD_ONLY) for option in made]

        @wraps(command)
        def run(**given: Any) -> None:
            with errors():
                for name, maker in makers.items():
                    given[name] = maker(
                        **{option: given.pop(option) for option in signature(maker).parameters}
                    )
            command(**given)

        run.__signature__ = signature(command).replace(parameters=options)  # type: ignore[attr-defined] # for typer
        run.__annotations__ = {option.name: option.annotation for option in options}
        return run

    return around
