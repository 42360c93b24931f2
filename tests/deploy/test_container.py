"""The image, the compose file and the manifests of Kubernetes.

No container can be run here. Linters check the files, and their commands run as processes in
namespaces of their own: as process 1, with the host names of the files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from nsparq.admin.options import TABLE as NSQADMIN
from nsparq.lookup.options import TABLE as NSQLOOKUPD
from nsparq.option_table import OptionTable
from nsparq.options import TABLE as NSQD
from nsparq.tools.main import main
from nsparq.tools.reference import TABLES
from tests.support import namespaces, wait_until

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "container/Dockerfile").read_text("utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "container/compose.yml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = {
    name: service for name, service in COMPOSE["services"].items() if name != "prometheus"
}
DAEMONS: dict[str, OptionTable[Any]] = {"nsqd": NSQD, "nsqlookupd": NSQLOOKUPD, "nsqadmin": NSQADMIN}
TOOLS = {table.program: table for table in TABLES}
PROGRAMS = Path(sys.executable).parent
MANIFESTS = sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
VALUES = {"POD_NAME": "nsqd-0", "POD_NAMESPACE": "nsparq", "POD_INDEX": "0"}
"""What Kubernetes sets in the variables of a pod."""


def instruction(name: str) -> str:
    """The last one of this name in the Dockerfile."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)[-1]


def exec_form(name: str) -> list[str]:
    """The words of an instruction that starts no shell."""
    words: list[str] = json.loads(re.sub(r"^.*?(?=\[)", "", instruction(name)))
    return words


def manifests() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        if path.name != "kustomization.yaml":
            yield from yaml.safe_load_all(path.read_text("utf-8"))


def pods() -> dict[str, dict[str, Any]]:
    """The pod of each workload."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in manifests()
        if "template" in one.get("spec", {})
    }


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    found: dict[str, Any] = container
    return found


def command_of(container: dict[str, Any]) -> list[str]:
    """With the values of the variables."""
    words = [*container["command"], *container["args"]]
    return [re.sub(r"\$\((\w+)\)", lambda match: VALUES[match[1]], word) for word in words]


COMMANDS = {
    "image": exec_form("CMD"),
    **{f"compose {name}": service["command"] for name, service in SERVICES.items()},
    **{f"kubernetes {name}": command_of(container_of(pod)) for name, pod in pods().items()},
}


# their form


def test_the_image_passes_the_linter() -> None:
    program = shutil.which("hadolint", path=f"{PROGRAMS}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("no hadolint")
    done = subprocess.run([program, DEPLOY / "container/Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_compose_file_has_the_form_that_compose_expects() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, DEPLOY / "container/compose.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["1.32", "1.37"])
def test_kubernetes_accepts_the_manifests(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    checked = 0
    for manifest in manifests():
        if not manifest["apiVersion"].startswith("keda.sh/"):
            validate(manifest, version, strict=True)
            checked += 1
    assert checked > 10


def test_kustomize_finds_every_manifest() -> None:
    kustomization = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text("utf-8"))
    assert {DEPLOY / "kubernetes" / name for name in kustomization["resources"]} == {
        path for path in MANIFESTS if path.parent.name == "kubernetes" and path.name != "kustomization.yaml"
    }
    if shutil.which("kubectl"):
        done = subprocess.run(["kubectl", "kustomize", DEPLOY / "kubernetes"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert {one["metadata"].get("namespace", "nsparq") for one in yaml.safe_load_all(done.stdout)} == {
            "nsparq"
        }


@pytest.mark.parametrize("name", COMMANDS)
def test_the_program_accepts_the_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = COMMANDS[name]
    if program in DAEMONS:
        options, warnings = DAEMONS[program].read_command_line(arguments)
        options.validate()
        assert not warnings
    elif program in TOOLS:
        TOOLS[program].read_flags(arguments)
    else:
        assert program == "nsparq"
        with pytest.raises(SystemExit, match="0"):
            main([*(word for word in arguments if not word.startswith("/")), "--help"])
    capsys.readouterr()


def test_the_pipelines_are_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config,) = (one for one in manifests() if one["kind"] == "ConfigMap")
    in_pod = tmp_path / "pipeline.toml"
    in_pod.write_text(config["data"]["pipeline.toml"])
    for file in (DEPLOY / "container/pipeline.toml", in_pod):
        assert main(["pipeline", "check", "--no-spark", str(file)]) == 0, capsys.readouterr().err


# what they promise


def test_nothing_runs_as_root() -> None:
    user = int(instruction("USER"))
    assert f"--uid {user} " in DOCKERFILE
    for pod in pods().values():
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == user
        security = container_of(pod)["securityContext"]
        assert security["readOnlyRootFilesystem"] and security["capabilities"] == {"drop": ["ALL"]}
    for service in SERVICES.values():
        assert service["read_only"] and service["cap_drop"] == ["ALL"]


def test_the_time_for_a_clean_stop_is_that_of_the_systemd_units() -> None:
    def seconds(unit: str) -> int:
        text = (DEPLOY / f"systemd/{unit}.service").read_text("utf-8")
        return int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0])

    assert instruction("STOPSIGNAL") == "SIGTERM"
    for name, unit in (("nsqd", "nsqd"), ("pipeline", "nsparq-pipeline@")):
        assert SERVICES[name]["stop_grace_period"] == f"{seconds(unit)}s"
    for name, unit in (
        ("nsqd", "nsqd"),
        ("nsqlookupd", "nsqlookupd"),
        ("nsqadmin", "nsqadmin"),
        ("pipeline", "nsparq-pipeline@"),
    ):
        assert pods()[name]["terminationGracePeriodSeconds"] == seconds(unit)


def test_data_is_on_a_volume() -> None:
    assert instruction("VOLUME") == instruction("WORKDIR") == "/data"
    for name in ("nsqd", "pipeline"):
        assert f"{name}:/data" in SERVICES[name]["volumes"]
        assert {"name": "data", "mountPath": "/data"} in container_of(pods()[name])["volumeMounts"]


def test_prometheus_asks_services_that_exist() -> None:
    config = yaml.safe_load((DEPLOY / "container/prometheus.yml").read_text("utf-8"))
    example = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))
    assert {job["job_name"] for job in config["scrape_configs"]} <= {
        job["job_name"] for job in example["scrape_configs"]
    }
    targets = [target for job in config["scrape_configs"] for target in job["static_configs"][0]["targets"]]
    assert {target.partition(":")[0] for target in targets} <= {*SERVICES}
    for volume in COMPOSE["services"]["prometheus"]["volumes"][:2]:
        assert (DEPLOY / "container" / volume.partition(":")[0]).exists()


def test_keda_asks_for_the_channel_that_the_consumer_reads() -> None:
    (scaled,) = (one for one in manifests() if one["kind"] == "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    asked = trigger["metadata"]
    assert trigger["type"] == "nsq" and all(isinstance(value, str) for value in asked.values())
    consumer = container_of(pods()[scaled["spec"]["scaleTargetRef"]["name"]])["args"]
    assert {f"--topic={asked['topic']}", f"--channel={asked['channel']}"} <= {*consumer}
    lookupds = asked["nsqLookupdHTTPAddresses"].replace(".nsparq.svc", "").split(",")
    assert [f"--lookupd-http-address={address}" for address in lookupds] == consumer[2:]


# as processes


def probes(name: str) -> list[str]:
    """The addresses that Kubernetes asks."""
    container = container_of(pods()[name])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    asked = [
        container[kind]["httpGet"]
        for kind in ("readinessProbe", "livenessProbe", "startupProbe")
        if kind in container
    ]
    assert any(one["path"] == "/ping" for one in asked)
    return [f"http://127.0.0.1:{ports[one['port']]}{one['path']}" for one in asked]


def hosts() -> list[str]:
    """Host names in the commands."""
    words = [word for command in COMMANDS.values() for word in command]
    return sorted({match[1] for word in words if (match := re.match(r"--[\w-]+-address=([\w.-]+)", word))})


@pytest.mark.parametrize("files", ["compose", "kubernetes"])
def test_the_daemons_start_are_healthy_know_each_other_and_stop(files: str, tmp_path: Path) -> None:
    """With the commands of the files, except for the folder of the data."""
    if not namespaces.are_possible():
        pytest.skip("no namespaces")
    with ExitStack() as stack:
        pod = stack.enter_context(namespaces.Pod(hosts()))
        running = {}
        for name in ("nsqlookupd", "nsqd", "nsqadmin"):
            program, *arguments = (
                word.replace("/data", str(tmp_path)) for word in COMMANDS[f"{files} {name}"]
            )
            running[name] = stack.enter_context(pod.start([str(PROGRAMS / program), *arguments], tmp_path))
        for name, container in running.items():
            wait_until(partial(is_healthy, container), what=container.log)
            assert all(is_healthy(container, url) for url in probes(name))
        nsqadmin = running["nsqadmin"]
        wait_until(lambda: '"broadcast_address":"nsqd' in fetch(nsqadmin, "http://127.0.0.1:4171/api/nodes"))
        assert "nsqd_healthy 1" in fetch(nsqadmin, "http://127.0.0.1:4151/metrics")
        for name in ("nsqd", "nsqadmin", "nsqlookupd"):
            assert running[name].stop() == 0, running[name].log()


def is_healthy(container: namespaces.Container, *url: str) -> bool:
    python, *check = exec_form("HEALTHCHECK")
    assert python == "python"
    done = container.run([sys.executable, *check, *url])
    assert done.stdout.startswith("http://127.0.0.1:"), done.stdout + done.stderr
    return done.returncode == 0


def fetch(container: namespaces.Container, url: str) -> str:
    code = (
        "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"
    )
    done = container.run([sys.executable, "-c", code, url])
    return done.stdout
