from __future__ import annotations

from pathlib import Path

import click
import yaml

from mesp.errors import MespError, plain_os_errors
from mesp.files import parse_yaml, read_bytes


def read_config(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Reads the file of an eager `--config`.

    A key is the name of an option or argument, with `_` or `-`. The value `null` keeps the default.
    Raises MespError if the file cannot be read, is not valid YAML, or has a key or a value that
    cannot be used.
    """
    if path is None:
        return
    try:
        with plain_os_errors(f"Cannot read {path}"):
            entries = parse_yaml(read_bytes(path))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise MespError(f"{path}{where} is not valid YAML: {error.problem}.") from error
    except UnicodeError as error:
        raise MespError(f"{path} is not valid YAML: it has half a character.") from error
    except yaml.YAMLError as error:  # bytes that are not text
        raise MespError(f"{path} is not valid YAML: it is not a text file.") from error
    except ValueError as error:  # too large, nested too deep, or a date that does not exist
        raise MespError(f"{path} is not valid YAML: {error}.") from error
    if entries is None:
        entries = {}
    if not isinstance(entries, dict):
        raise MespError(f"{path} must be a list of options, one `name: value` a line.")

    parameters = {
        name.lstrip("-").replace("-", "_"): parameter
        for parameter in context.command.params
        if not parameter.is_eager
        for name in (parameter.name, *parameter.opts)
    }
    context.default_map = {}
    for key, value in entries.items():
        parameter = parameters.get(str(key).replace("-", "_"))
        if parameter is None:
            raise MespError(
                f"{path} sets {key}, which is not an option; "
                f"`{context.command_path} --help` lists what there is."
            )
        if value is None:
            continue
        # Values become text, as if typed. click refuses the text 2.5 for an integer, but rounds the
        # number 2.5 down.
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str | int | float) for each in listed):
            raise MespError(f"{path} sets {key} to {value}, which must be a plain value or a list.")
        if any("\0" in each for each in listed if isinstance(each, str)):
            raise MespError(f"{path} sets {key} to a text with a null character; take it out.")
        typed = ",".join(str(each) for each in listed)
        try:
            parameter.type_cast_value(context, typed)
        except click.BadParameter as error:
            raise MespError(f"{path} sets {key} to {value}: {error.message}") from error
        context.default_map[parameter.name] = typed


config_option = click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=read_config,
    help="YAML file with any of these options by name, as in `seq_len: 128`, and `bundle`; "
    "options on the command line override it.",
)
