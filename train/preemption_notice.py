"""The notice that a cloud gives before it takes a spot machine away, as its metadata server says it."""

from __future__ import annotations

import os
import time
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from entrypoint.core.console import write_stderr
from entrypoint.core.errors import first_line
from train.preemption import STOP_CONTROLLER, Deadline

# EC2 gives two minutes, Google half a minute.
POLL_S, TIMEOUT_S = 3.0, 2.0
# Who made the machine, by the kernel's DMI tables; other clouds give notice by signals.
VENDOR = Path("/sys/class/dmi/id/sys_vendor")
VENDORS = {"Amazon EC2": "ec2", "Google": "gce"}


def watch_for_notice(chosen: str) -> None:
    """Stop the run, as its deadline does, once the cloud gives notice; `chosen` is TRAIN_PREEMPTION."""
    cloud = cloud_of_machine() if chosen == "auto" else chosen
    if cloud in VENDORS.values():
        Thread(target=poll, args=(cloud, chosen), daemon=True).start()


def cloud_of_machine() -> str:
    """Return the cloud whose machine this is, empty if it is none of the known ones."""
    try:
        return VENDORS.get(VENDOR.read_text().strip(), "")
    except OSError:
        return ""


def poll(cloud: str, chosen: str) -> None:
    """Ask until there is a notice; a server that does not answer is named once if the user chose the cloud."""
    silent = chosen == "auto"
    while True:
        try:
            if has_notice(cloud):
                STOP_CONTROLLER.deadline = Deadline(time.monotonic(), f"{cloud}'s notice of preemption")
                return
        except (OSError, HTTPException, ValueError) as error:
            if not silent:
                write_stderr(f"train: TRAIN_PREEMPTION={cloud}: no answer of its metadata server ({first_line(error)})")
            silent = True
        time.sleep(POLL_S)


def has_notice(cloud: str) -> bool:
    """Return whether the cloud is about to stop this machine; raises any error of urllib without an answer.

    Sources: EC2, "Spot Instance interruption notices" with IMDSv2; Compute Engine, "Spot VMs, handle preemption".
    The variables are those of the clouds' own libraries.
    """
    if cloud == "gce":
        host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
        return read(f"http://{host}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}) == "TRUE"
    server = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    token = read(f"{server}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    return bool(read(f"{server}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}))


def read(url: str, headers: dict[str, str], method: str = "GET") -> str:
    """Return what a metadata server answers, empty where it has nothing; no proxy is asked."""
    try:
        request = Request(url, headers=headers, method=method)
        with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:
            return str(answer.read(1000), "utf-8", "replace").strip()
    except HTTPError as error:
        if error.code == 404:
            return ""
        raise
