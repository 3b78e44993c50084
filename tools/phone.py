"""Reads and writes the app's files on a phone, with `xcrun devicectl` or `pymobiledevice3`.

devicectl needs Xcode 15 or later and iOS 17 or later. pymobiledevice3 is licensed under the GPL, so
it is only run as a program.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.text import Text

from mesp.errors import MespError
from mesp.formatting import printable

APP = "org.mesp.MeSPTrainer"
TIMEOUT = 600  # seconds for one command of devicectl
NO_PHONE = (
    "No phone can be reached: connect it with a cable, unlock it, tap Trust and turn on "
    "Developer Mode{otherwise}."
)


class Phone(Protocol):
    name: str

    def pull(self, source: str, destination: Path) -> None:
        """Copies the app's folder `source` into `destination`, if `source` exists."""

    def push(self, source: Path, folder: str) -> None:
        """Copies the folder `source` into `folder` of the app's container."""

    def launch(self, *arguments: str) -> None:
        """Starts the app with these arguments. Ends the app first if it is running."""


def connect(device: str | None, app: str, otherwise: str) -> Phone:
    """Returns the phone `device`, or the only phone if `device` is None."""
    if shutil.which("xcrun") is not None and (has_devicectl() or not pymobiledevice3()):
        return Devicectl(device, app, otherwise)
    if pymobiledevice3():
        return PyMobileDevice3(device, app, otherwise)
    raise MespError(
        "A phone is read and written with xcrun, which comes with Xcode on a Mac, or elsewhere "
        f"with pymobiledevice3: pip install pymobiledevice3{otherwise}."
    )


def copying(what: str):
    # A phone's name may contain rich's markup or control characters. Text and printable make them
    # harmless.
    return Console(stderr=True).status(Text(printable(f"Copying {what}")))


def choose(reachable: list[tuple[str, str]], otherwise: str) -> tuple[str, str]:
    if not reachable:
        raise MespError(NO_PHONE.format(otherwise=otherwise))
    if len(reachable) > 1:
        listed = ", ".join(f"{name} ({identifier})" for name, identifier in reachable)
        raise MespError(f"Several phones can be reached, choose one with --device: {listed}.")
    return reachable[0]


def locked(device: str) -> MespError:
    return MespError(f"The phone {device} is locked: unlock it and try again.")


def not_installed(device: str, app: str) -> MespError:
    return MespError(
        f"The app {app} is not on the phone {device}, or was not installed from Xcode: "
        "build it onto the phone, or name another one with --app."
    )


def has_devicectl() -> bool:
    return run(["xcrun", "--find", "devicectl"]).returncode == 0


class DevicectlError(MespError):
    def __init__(self, text: str, error: dict):
        super().__init__(text)
        self.everything = text + json.dumps(error)

    def means(self, *signs: str) -> bool:
        return any(sign in self.everything for sign in signs)


class Devicectl:
    def __init__(self, device: str | None, app: str, otherwise: str):
        self.app = app
        self.name = device or self.only_device(otherwise)
        self.container = (
            *("--device", self.name),
            *("--domain-type", "appDataContainer", "--domain-identifier", app),
        )

    def only_device(self, otherwise: str) -> str:
        reachable = []
        for device in devicectl("list", "devices")["devices"]:
            hardware, connection = device["hardwareProperties"], device["connectionProperties"]
            if (
                hardware.get("platform") in ("iOS", "iPadOS")
                and hardware.get("reality", "physical") == "physical"
                and connection.get("pairingState") == "paired"
                and connection.get("tunnelState") != "unavailable"
            ):
                reachable.append((device["deviceProperties"]["name"], device["identifier"]))
        return choose(reachable, otherwise)[1]

    def pull(self, source: str, destination: Path) -> None:
        try:
            devicectl(
                *("device", "copy", "from", *self.container),
                *("--source", source, "--destination", str(destination)),
            )
        except DevicectlError as error:
            if not error.means("Failed to retrieve the file node"):
                raise self.explained(error, "read") from error

    def push(self, source: Path, folder: str) -> None:
        try:
            devicectl(
                *("device", "copy", "to", *self.container),
                *("--source", str(source), "--destination", f"{folder}/{source.name}"),
            )
        except DevicectlError as error:
            raise self.explained(error, "written") from error

    def launch(self, *arguments: str) -> None:
        try:
            # All arguments after the identifier go to the app.
            devicectl(
                *("device", "process", "launch", "--device", self.name, "--terminate-existing"),
                behind=(self.app, *arguments),
            )
        except DevicectlError as error:
            raise self.explained(error, "told to start the app") from error

    def explained(self, error: DevicectlError, done: str) -> MespError:
        if error.means("DeviceLocked", "0xE80000E2", "device is locked", "could not be, unlocked"):
            return locked(self.name)
        if error.means("ContainerLookupErrorDomain"):
            return not_installed(self.name, self.app)
        if error.means("The specified device was not found"):
            return MespError(
                f"There is no phone {self.name}: `xcrun devicectl list devices` "
                "shows which there are."
            )
        return MespError(f"The phone {self.name} cannot be {done}: {error.message}")


def devicectl(*arguments: str, behind: tuple[str, ...] = ()) -> dict:
    with tempfile.TemporaryDirectory(prefix="mesp-devicectl-") as folder:
        path = Path(folder, "result.json")
        options = ("--timeout", str(TIMEOUT), "--json-output", str(path))
        done = run(["xcrun", "devicectl", *arguments, *options, *behind])
        try:
            answer = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            answer = {}
    if done.returncode == 0 and "result" in answer:
        return answer["result"]
    if "unable to find utility" in done.stderr:
        raise MespError(
            "xcrun finds no devicectl: install Xcode 15 or later and choose it with "
            "`sudo xcode-select -s /Applications/Xcode.app`."
        )
    said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    text = said[0].removeprefix("ERROR: ") if said else done.stderr.strip() or "devicectl failed."
    raise DevicectlError(text, answer.get("error", {}))


def pymobiledevice3() -> str | None:
    beside = Path(sys.executable).with_name("pymobiledevice3")
    return shutil.which("pymobiledevice3") or (str(beside) if os.access(beside, os.X_OK) else None)


class PyMobileDevice3:
    def __init__(self, device: str | None, app: str, otherwise: str):
        self.app = app
        listed = json.loads(self.call("usbmux", "list") or "[]")
        # A phone is listed twice if it is connected by cable and by network.
        phones = {
            phone["Identifier"]: phone["DeviceName"]
            for phone in listed
            if phone.get("DeviceClass") in ("iPhone", "iPad")
        }
        matching = [(name, own) for own, name in phones.items() if device in (None, name, own)]
        if device is not None and not matching:
            raise MespError(
                f"There is no phone {device}: `pymobiledevice3 usbmux list` shows which there are."
            )
        self.name, self.identifier = choose(matching, otherwise)

    def pull(self, source: str, destination: Path) -> None:
        self.documents("pull", source, str(destination), absent_is_fine=True)

    def push(self, source: Path, folder: str) -> None:
        self.documents("push", str(source), folder)

    def launch(self, *arguments: str) -> None:
        raise MespError(
            "Starting the app takes Xcode's devicectl: press Check This Phone in the app's tab "
            "Models instead, and collect the report with tools/collect.py."
        )

    def documents(self, verb: str, *paths: str, absent_is_fine: bool = False) -> None:
        try:
            udid = {"PYMOBILEDEVICE3_UDID": self.identifier}
            self.call("apps", verb, "--documents", self.app, *paths, **udid)
        except MespError as error:
            if "No such file on the device" in error.message and absent_is_fine:
                return
            if "No app with bundle ID" in error.message:
                raise not_installed(self.name, self.app) from error
            if "password protected" in error.message or "passcode" in error.message:
                raise locked(self.name) from error
            raise MespError(f"The phone {self.name} cannot be reached: {error.message}") from error

    @staticmethod
    def call(*arguments: str, **environment: str) -> str:
        done = run([pymobiledevice3() or "", *arguments], **environment)
        if done.returncode == 0:
            return done.stdout
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise MespError(lines[-1] if lines else "pymobiledevice3 failed.")


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "errors": "replace"}
    return subprocess.run(command, env=os.environ | environment, **streams)
