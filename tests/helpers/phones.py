import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
APP = "org.mesp.MeSPTrainer"
PROGRAMS = {"xcrun": HERE / "fake_xcrun", "pymobiledevice3": HERE / "fake_pymobiledevice3"}


class Phones:
    def __init__(self, folder: Path):
        self.folder = folder
        self.world = {"devices": [], "nests": False}
        self.program = "xcrun"

    def add(self, name: str, **more: object) -> Path:
        number = len(self.world["devices"])
        container = self.folder / f"container-{number}"
        (container / "Documents").mkdir(parents=True)
        device = {"name": name, "identifier": f"ID-{number}", "udid": f"0000-{number}"}
        device |= {"apps": {APP: str(container)}, **more}
        self.world["devices"].append(device)
        return container / "Documents" / "runs"

    def environment(self) -> dict[str, str]:
        described = self.folder / "phones.json"
        described.write_text(json.dumps(self.world))
        programs = self.folder / "programs"
        programs.mkdir(exist_ok=True)
        if not (programs / "python3").exists():
            (programs / "python3").symlink_to(sys.executable)
        path = os.pathsep.join(map(str, (PROGRAMS[self.program], programs)))
        return {"FAKE_XCRUN": str(described), "PATH": path}

    def calls(self) -> list[list[str]]:
        calls = self.folder / "calls.jsonl"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [json.loads(line) for line in lines]
