"""Copies a bundle into the app on a phone.

python tools/push.py qwen.mesp [--device ID]
"""

import time
from pathlib import Path

import click

from mesp.bundle.manifest import read_manifest
from mesp.commands.command import Command
from mesp.errors import MespError
from mesp.formatting import megabytes, printable
from phone import APP, connect, copying

FOLDER_ON_PHONE = "Documents"


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--device", help="Which phone: name, UDID or identifier.  [default: the only one]")
@click.option("--app", default=APP, show_default=True, help="Bundle identifier of the app.")
def main(bundle: Path, device: str | None, app: str) -> None:
    """Copy BUNDLE into the app on a phone."""
    bundle = bundle.resolve()
    manifest = read_manifest(bundle)
    if bundle.suffix != ".mesp":
        raise MespError(f"The app lists folders that end in .mesp: rename {bundle.name} first.")
    size = sum(file.size for file in manifest.files)
    phone = connect(device, app, otherwise="")
    began = time.monotonic()
    with copying(f"{bundle.name}, {megabytes(size)} MB, to {phone.name}"):
        phone.push(bundle, FOLDER_ON_PHONE)
    seconds = time.monotonic() - began
    said = f"{bundle.name} is on {phone.name} ({megabytes(size)} MB, {seconds:.0f} s)."
    click.echo(printable(said))


if __name__ == "__main__":
    main()
