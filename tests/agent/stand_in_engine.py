"""What stands for docker: images are folders, a container is a copy of one with namespaces of its own.

It speaks the words that `slime.agent.sandbox` gives an engine, and refuses all others. ``FOLDER`` of the
environment has ``images/NAME`` and ``containers/NAME``, and ``calls``, a line for each call. The machine's
programs are shown in all containers; users are not told apart.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

FOLDER = Path(os.environ.get("STAND_IN_ENGINE_FOLDER", os.devnull))
SHOWN = ("usr", "bin", "sbin", "lib", "lib64")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FIRST = """
mount --make-rprivate /
for name in usr bin sbin lib lib64 dev; do
    [ -d /$name ] && mkdir -p $0/$name && mount --rbind /$name $0/$name
done
mkdir -p $0/proc $0/tmp && mount -t proc proc $0/proc && touch $0/../ready && exec chroot $0 "$@"
"""


def images():
    return FOLDER / "images"


def of_image(name):
    return images() / name.replace("/", "_")


def containers():
    return FOLDER / "containers"


def fail(text, code=1):
    print(f"Error: {text}", file=sys.stderr)
    raise SystemExit(code)


def parser_of(*words):
    parser = argparse.ArgumentParser(prog=" ".join(["docker", *words]), allow_abbrev=False)
    return parser


def facts_of(name):
    for folder in containers().glob("*"):
        if folder.name == name and (folder / "facts.json").exists():
            return json.loads((folder / "facts.json").read_text())
    return fail(f"no such container: {name}")


def first_process(name):
    """The process 1 of a container as this machine counts, or None where it has ended."""
    facts = facts_of(name)
    children = Path(f"/proc/{facts['pid']}/task/{facts['pid']}/children")
    try:
        found = children.read_text().split()
    except OSError:
        return None
    return int(found[0]) if found else None


def run(words):
    parser = parser_of("run")
    for flag in ("--detach", "--rm", "--init"):
        parser.add_argument(flag, action="store_true", required=True)
    for flag in ("--pull", "--name", "--network", "--pids-limit", "--memory", "--memory-swap", "--cpus"):
        parser.add_argument(flag, required=True)
    for flag in ("--security-opt", "--user", "--entrypoint"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--label", action="append")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--cap-drop", action="append")
    parser.add_argument("image")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    image = of_image(given.image)
    if not image.is_dir():
        fail(f"no such image: {given.image}", 125)
    folder = containers() / given.name
    shutil.copytree(image / "root", folder / "root", symlinks=True)
    (folder / "root/etc").mkdir(exist_ok=True)
    (folder / "root/etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    launch(folder, [given.entrypoint, *given.words])
    settings = json.loads((image / "settings.json").read_text())
    labels = dict(label.split("=", 1) for label in given.label)
    facts = {
        **vars(given),
        "labels": labels,
        "pid": int((folder / "pid").read_text()),
        "created": clock(),
        **settings,
    }
    (folder / "facts.json").write_text(json.dumps(facts))
    print(given.name)


def launch(folder, words):
    root = folder / "root"
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
    with open(folder / "errors", "wb") as errors:
        process = subprocess.Popen(
            [*unshare, "sh", "-ec", FIRST, str(root), *words],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
            env={"PATH": PATH},
        )
    (folder / "pid").write_text(str(process.pid))
    while not (folder / "ready").exists():
        if process.poll() is not None:
            fail((folder / "errors").read_text(), 125)
        time.sleep(0.01)


def execute(words):
    parser = parser_of("exec")
    parser.add_argument("--interactive", action="store_true")
    parser.add_argument("--user")
    parser.add_argument("--workdir")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("name")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    if (pid := first_process(given.name)) is None:
        fail(f"container {given.name} is not running")
    if given.user not in ("root", "agent"):
        fail(f"unable to find user {given.user}", 126)
    facts = facts_of(given.name)
    folder = given.workdir or facts["workdir"]
    root = containers() / given.name / "root"
    if not (root / folder.strip("/")).is_dir():
        fail(f"chdir to {folder}: no such directory", 126)
    values = [one if "=" in one else f"{one}={os.environ[one]}" for one in given.env]
    enter = ["nsenter", f"--target={pid}", "--user", "--preserve-credentials", "--mount", "--pid", "--root"]
    inside = ["/usr/bin/env", "-i", "-C", folder, f"PATH={PATH}", "HOME=/root", *facts["env"], *values]
    done = subprocess.Popen(
        [*enter, *inside, *given.words],
        stdin=None if given.interactive else subprocess.DEVNULL,
        start_new_session=True,
    )
    code = done.wait()
    raise SystemExit(code if code >= 0 else 128 - code)


def remove(words):
    parser = parser_of("rm")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--volumes", action="store_true")
    parser.add_argument("names", nargs="+")
    for name in parser.parse_args(words).names:
        pid = facts_of(name)["pid"]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # --kill-child
        shutil.rmtree(containers() / name, ignore_errors=True)


def listed(words):
    parser = parser_of("ps")
    parser.add_argument("--all", action="store_true", required=True)
    parser.add_argument("--quiet", action="store_true", required=True)
    parser.add_argument("--filter", required=True)
    label = parser.parse_args(words).filter.removeprefix("label=")
    for folder in containers().glob("*"):
        if (folder / "facts.json").exists() and label in facts_of(folder.name)["labels"]:
            print(folder.name)


def inspect(words):
    parser = parser_of("inspect")
    parser.add_argument(
        "--format", required=True, choices=["{{.Id}} {{json .Created}} {{json .Config.Labels}}"]
    )
    parser.add_argument("names", nargs="+")
    for name in parser.parse_args(words).names:
        facts = facts_of(name)
        print(name, json.dumps(facts["created"]), json.dumps(facts["labels"]))


def info(words):
    parser = parser_of("info")
    parser.add_argument("--format", required=True, choices=["{{json .SystemTime}}"])
    parser.parse_args(words)
    print(json.dumps(clock()))


def clock():
    """The time as docker tells it; the file ``clock`` says how far it is ahead of this machine."""
    told = FOLDER / "clock"
    ahead = float(told.read_text()) if told.exists() else 0.0
    now = datetime.now(UTC) + timedelta(seconds=ahead)
    return now.strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


def image(words):
    parser = parser_of("image")
    parser.add_argument("verb", choices=["inspect"])
    parser.add_argument("--format", choices=["{{.Id}} {{json .Created}} {{json .Config.Labels}}"])
    parser.add_argument("names", nargs="+")
    for name in parser.parse_args(words).names:
        if not of_image(name).is_dir():
            fail(f"no such image: {name}")
        settings = json.loads((of_image(name) / "settings.json").read_text())
        print(name, json.dumps(settings.get("created")), json.dumps(settings.get("labels")))


def commit(words):
    parser = parser_of("commit")
    parser.add_argument("--change", action="append", default=[])
    parser.add_argument("name")
    parser.add_argument("image")
    given = parser.parse_args(words)
    facts, labels = facts_of(given.name), {}
    for change in given.change:
        verb, _, rest = change.partition(" ")
        if verb != "LABEL":
            fail(f"{change}: not understood")
        labels |= dict([shlex.split(rest)[0].split("=", 1)])
    made = FOLDER / f"building-{os.getpid()}"
    shown = shutil.ignore_patterns(*SHOWN, "dev", "proc")
    root = containers() / given.name / "root"
    at_the_top = lambda folder, names: shown(folder, names) if Path(folder) == root else ()
    shutil.copytree(root, made / "root", symlinks=True, ignore=at_the_top)
    settings = {"workdir": facts["workdir"], "created": clock(), "labels": labels, "name": given.image}
    (made / "settings.json").write_text(json.dumps(settings))
    made.rename(of_image(given.image))


def rmi(words):
    (name,) = words
    if any(facts_of(folder.name)["image"] == name for folder in containers().iterdir()):
        fail(f"{name}: a container uses it")
    shutil.rmtree(of_image(name))


def listed_images(words):
    parser = parser_of("images")
    parser.add_argument("--quiet", action="store_true", required=True)
    parser.add_argument("--filter", required=True)
    label = parser.parse_args(words).filter.removeprefix("label=")
    for file in images().glob("*/settings.json"):
        settings = json.loads(file.read_text())
        if label in settings.get("labels", {}):
            print(settings["name"])


def pull(words):
    fail(f"{words[-1]}: no such image at any registry")


def build(words):
    """Makes an image of a Dockerfile with FROM, COPY and WORKDIR."""
    parser = parser_of("build")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--tag", required=True)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(words)
    made = FOLDER / f"building-{os.getpid()}"
    root, workdir = made / "root", "/"
    root.mkdir(parents=True)
    for line in (given.folder / "Dockerfile").read_text().splitlines():
        verb, *rest = line.split()
        if verb == "WORKDIR":
            workdir = rest[0]
            (root / workdir.strip("/")).mkdir(parents=True, exist_ok=True)
        elif verb == "COPY":
            target = root / workdir.strip("/") / rest[1]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(given.folder / rest[0], target)
        elif verb != "FROM":
            fail(f"{verb}: not understood")
    (made / "settings.json").write_text(json.dumps({"workdir": workdir}))
    images().mkdir(exist_ok=True)
    made.rename(of_image(given.tag))


VERBS = {
    **{"run": run, "exec": execute, "rm": remove, "ps": listed, "inspect": inspect},
    **{"image": image, "pull": pull, "build": build, "info": info},
    **{"commit": commit, "rmi": rmi, "images": listed_images},
}


def main():
    verb, *words = sys.argv[1:]
    with open(FOLDER / "calls", "a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    VERBS[verb](words)


if __name__ == "__main__":
    main()
