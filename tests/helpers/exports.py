import sys
from pathlib import Path

from click.testing import CliRunner, Result

from mesp.bundle.reader import Bundle
from mesp.commands.export import main

NEAREST = ("--quantize", "nearest", "--head-bits", 4)  # like MLX's `nn.quantize`
COMMAND = str(Path(sys.executable).with_name("mesp-export"))


def export(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def exported(*arguments: object) -> Bundle:
    result = export(*arguments, "--out", "out.mesp", "--overwrite")
    assert result.exit_code == 0, result.output
    bundle = Bundle("out.mesp")
    bundle.verify()
    return bundle


def refused(*arguments: object) -> str:
    before = sorted(Path().rglob("*"))
    result = export(*arguments)
    assert result.exit_code == 2, result.output
    assert sorted(Path().rglob("*")) == before
    assert result.stdout == ""
    *_, line = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


def content(bundle: Path) -> dict[str, bytes]:
    return {str(f.relative_to(bundle)): f.read_bytes() for f in bundle.rglob("*") if f.is_file()}
