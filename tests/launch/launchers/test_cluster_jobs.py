"""`llmsys launch --by` prints what Kubernetes, SkyPilot and Ray take, checked against their own
schemas and parsers.
"""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest
import yaml
from torch.distributed.run import config_from_args, parse_args

from llmsys.config.loading.load import load_run_config
from llmsys.errors import LostRankError
from llmsys.launch.launchers import kubernetes
from llmsys.launch.launchers.kubernetes import IMAGE_CHECKOUT, WORKSPACE, format_dns_label
from llmsys.launch.main import main
from tests.helpers.launch_config import SMALL
from tests.helpers.paths import ROOT

SCHEMAS = ROOT / "tests" / "data" / "cluster_schemas"
KINDS = {"Job": "V1Job", "Service": "V1Service", "ConfigMap": "V1ConfigMap"}


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "hush")
    (tmp_path / "toy.yaml").write_text(
        yaml.safe_dump(SMALL | {"run": {"name": "A toy", "folder": "runs/toy"}})
    )


def print_job(capsys: pytest.CaptureFixture[str], by: str, *words: str) -> str:
    assert main(["launch", "toy.yaml", "launch.processes=2", "--print", "--by", by, *words]) == 0
    text = capsys.readouterr().out
    assert "hush" not in text
    return text


def load_schema(name: str, *path: str) -> dict[str, Any]:
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    return (
        {"$ref": f"#/$defs/{path[0]}", "$defs": schema["$defs"]}
        if "$defs" in schema
        else schema[path[0]]
    )


def parse_agent_command(words: list[str]) -> tuple[dict[str, str], Any, list[str]]:
    """Return the restart agent's options, torchrun's own reading of its arguments, and the
    script with its config.
    """
    second = words.index(words[0], 1)
    assert words[1:3] == ["-m", "llmsys.launch.launchers.restart_agent"]
    assert words[second + 1 : second + 3] == ["-m", "llmsys.launch.launchers.torchrun"]
    config, _, _ = config_from_args(parse_args(words[second + 3 :]))
    options = dict(word.removeprefix("--").split("=", 1) for word in words[3:second])
    return options, config, words[-2:]


@pytest.mark.parametrize("nodes", [1, 4])
def test_kubernetes_takes_the_objects_and_torchrun_the_command(
    capsys: pytest.CaptureFixture[str], nodes: int
) -> None:
    text = print_job(
        capsys, "kubernetes", f"nodes={nodes}", "--volume", "disk", "--image", "registry/llmsys:1"
    )
    objects = {one["kind"]: one for one in yaml.safe_load_all(text)}
    for kind, one in objects.items():
        jsonschema.validate(one, load_schema("kubernetes", KINDS[kind]))
    assert objects.keys() == (
        {"ConfigMap", "Job", "Service"} if nodes > 1 else {"ConfigMap", "Job"}
    )
    job = objects["Job"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == (
        "Indexed",
        nodes,
        nodes,
    )
    pod, labels = job["template"]["spec"], job["template"]["metadata"]["labels"]
    [container] = pod["containers"]
    assert (container["image"], container["workingDir"]) == ("registry/llmsys:1", WORKSPACE)
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert mounts == {"config": "/etc/llmsys", "workspace": WORKSPACE, "shared-memory": "/dev/shm"}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory"}
    assert volumes["workspace"]["persistentVolumeClaim"] == {"claimName": "disk"}
    options, torchrun, script = parse_agent_command(container["command"])
    meeting = "127.0.0.1:29500" if nodes == 1 else "a-toy-0.a-toy:29500"
    assert (options["meet"], torchrun.rdzv_endpoint) == (meeting, meeting)
    assert (torchrun.min_nodes, torchrun.max_nodes, torchrun.nproc_per_node) == (nodes, nodes, 2)
    assert script == [f"{IMAGE_CHECKOUT}/launch/train.py", "/etc/llmsys/config.yaml"]
    if nodes > 1:  # the first pod's name is that of its Job, its index, and the Service
        assert (
            pod["subdomain"]
            == objects["Service"]["metadata"]["name"]
            == objects["Job"]["metadata"]["name"]
        )
        assert objects["Service"]["spec"]["selector"].items() <= labels.items()
        assert objects["Service"]["spec"]["publishNotReadyAddresses"]
        assert torchrun.local_addr == "$(POD_IP)"
    Path("config.yaml").write_text(objects["ConfigMap"]["data"]["config.yaml"])
    assert load_run_config("config.yaml").batch.sequences == SMALL["batch"]["sequences"]
    assert not Path("runs").exists()  # the volume is not mounted here


def test_a_pod_that_saved_is_replaced_and_one_with_a_wrong_config_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    documents = yaml.safe_load_all(print_job(capsys, "kubernetes", "nodes=2", "--gpus", "0"))
    job = next(one for one in documents if one["kind"] == "Job")["spec"]
    rules = [
        (rule["action"], rule.get("onExitCodes", {}).get("values"))
        for rule in job["podFailurePolicy"]["rules"]
    ]
    assert rules == [("FailJob", [2]), ("Ignore", [75]), ("Ignore", None)]
    assert "resources" not in job["template"]["spec"]["containers"][0]


def test_text_that_yaml_would_read_as_something_else_stays_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = 'a: "b" # c {{ d }} é <&>'
    monkeypatch.setenv("NCCL_DEBUG", hostile)
    words = ("run.name=on", "--volume", "no", "--image", "1.0")
    documents = list(yaml.safe_load_all(print_job(capsys, "kubernetes", "nodes=2", *words)))
    pod = documents[-1]["spec"]["template"]["spec"]
    assert {one["metadata"]["name"] for one in documents} == {"on"} == {pod["subdomain"]}
    assert pod["containers"][0]["image"] == "1.0"
    assert {"name": "NCCL_DEBUG", "value": hostile} in pod["containers"][0]["env"]
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "no"}
    task = yaml.safe_load(print_job(capsys, "skypilot", "nodes=2", "device=h100-sxm", *words))
    assert (task["name"], task["volumes"]) == ("on", {WORKSPACE: "no"})
    assert task["envs"]["NCCL_DEBUG"] == hostile


def test_the_image_has_what_the_pods_expect() -> None:
    text = (ROOT / "containers" / "Dockerfile").read_text()
    folders = re.findall(r"^WORKDIR (\S+)$", text, re.MULTILINE)
    assert folders == [IMAGE_CHECKOUT, WORKSPACE]
    assert "COPY launch launch" in text
    assert (ROOT / "launch" / "train.py").is_file()


@pytest.mark.parametrize(("image", "nodes"), [("", 4), ("registry/llmsys:1", 1)])
def test_skypilot_takes_the_task_and_its_nodes_find_each_other(
    capsys: pytest.CaptureFixture[str], image: str, nodes: int
) -> None:
    text = print_job(capsys, "skypilot", f"nodes={nodes}", "device=h100-sxm", "--image", image)
    task = yaml.safe_load(text)
    jsonschema.validate(task, load_schema("skypilot", "task"))
    jsonschema.validate(task["resources"], load_schema("skypilot", "resources"))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (nodes, "H100:2")
    assert task["envs"]["NCCL_DEBUG"] == "INFO"
    assert ("setup" in task, "image_id" in task["resources"]) == (not image, bool(image))
    # the third node runs it, and its command is printed in place of being run
    shell = task["run"].replace("\nexec ", "\nprintf '%s\\n' ").replace(f"cd {WORKSPACE}", ":")
    ips = "\n".join(f"10.0.0.{number}" for number in range(1, nodes + 1))
    environment = {"HOME": str(Path.cwd()), "PATH": "/usr/bin:/bin", "SKYPILOT_NODE_IPS": ips}
    environment["SKYPILOT_NODE_RANK"] = str(min(2, nodes - 1))
    done = subprocess.run(
        ["bash", "-c", shell], env=environment, capture_output=True, text=True, check=True
    )
    options, torchrun, script = parse_agent_command(done.stdout.splitlines())
    first, own = ("10.0.0.1", "10.0.0.3") if nodes > 1 else ("127.0.0.1", "127.0.0.1")
    assert (options["meet"], torchrun.local_addr) == (f"{first}:29500", own)
    assert (torchrun.max_nodes, torchrun.nproc_per_node) == (nodes, 2)
    assert script[0] == f"{IMAGE_CHECKOUT if image else Path.cwd() / 'sky_workdir'}/launch/train.py"
    assert load_run_config(script[1]).run.name == "A toy"


def test_ray_takes_the_command_and_the_job_takes_what_ray_passes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.dashboard.modules.job.cli import submit
    from ray.runtime_env import RuntimeEnv

    from llmsys.launch.launchers import ray_job

    words = shlex.split(print_job(capsys, "ray", "nodes=4"))
    assert words[:3] == ["ray", "job", "submit"]
    given = submit.make_context("submit", words[3:]).params
    assert RuntimeEnv(**json.loads(given["runtime_env_json"]))["env_vars"]["NCCL_DEBUG"] == "INFO"
    # as Ray joins it, for a shell
    entry = shlex.split(subprocess.list2cmdline(given["entrypoint"]))
    assert entry[1:3] == ["-m", "llmsys.launch.launchers.ray_job"]
    plans: list[Any] = []
    monkeypatch.setattr(ray_job, "run_on_nodes", lambda plan, gpus: plans.append((plan, gpus)) or 0)
    assert ray_job.main(entry[3:]) == 0
    [(plan, gpus)] = plans
    assert (len(plan.hosts), plan.hosts[0].slots, gpus, plan.port) == (4, 2, 2, 29500)
    monkeypatch.setattr(ray_job, "run_on_nodes", Mock(side_effect=LostRankError("node 1 is lost")))
    assert ray_job.main(entry[3:]) == LostRankError.exit_status == 3  # the same command resumes it
    assert plan.script_arguments[1] == str(Path.cwd() / "runs/toy/launch/config.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["nodes=2", "--by", "ray"],
            "--by ray starts nothing. Add --print, and give the output to `sh`",
        ),
        (["nodes=a:2", "--by", "ray", "--print"], "nodes=a:2 names hosts, but ray chooses them"),
        (
            ["nodes=2", "--by", "ray", "--print", "--launcher", "slurm"],
            "--by ray starts the ranks of a host by torchrun",
        ),
        (
            ["nodes=2", "spares=1", "--by", "kubernetes", "--print"],
            "spares=1: kubernetes itself finds another host",
        ),
        (
            ["nodes=2", "--by", "ray", "--print", "--min-hosts", "1"],
            "--min-hosts 1: a Ray job needs all of its nodes",
        ),
        (
            ["nodes=2", "--by", "ray", "--print", "--sbatch=--time=1"],
            "--sbatch is for Slurm, and --by ray asks",
        ),
        (["nodes=2", "device=H100"], "device=H100 is for --by skypilot"),
        (
            ["nodes=2", "--by", "skypilot", "--print"],
            "needs the name of the 2 accelerators of a node. Give device=",
        ),
        (
            ["nodes=2", "run.folder=/data/run", "--by", "kubernetes", "--print"],
            "run.folder=/data/run is outside /workspace, where the volume of all hosts is mounted",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_cluster_cannot_do_is_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "toy.yaml", "launch.processes=2", *words]) == 2
    assert message in capsys.readouterr().err


def test_folders_of_the_volume_and_of_an_object_store_are_accepted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert f"folder: {WORKSPACE}/b" in print_job(
        capsys, "kubernetes", "nodes=2", f"run.folder={WORKSPACE}/b"
    )


def test_names_are_labels_of_dns() -> None:
    for name, label in (
        ("llama-8b-64", "llama-8b-64"),
        ("8B run_2.", "run-8b-run-2"),
        ("É" * 3, "run"),
    ):
        assert format_dns_label(name) == label
    assert len(format_dns_label("a" * 80)) == kubernetes.MAX_NAME_LETTERS
