"""Files: patches, images, and what the client looks for before it begins."""

import base64
import struct
import zlib

from model import call, patch
from scenario import exited, holds, lacks, runs, text_of


@runs
def patches_add_change_move_and_delete(scenario):
    workspace = scenario.workspace
    (workspace / "changed.txt").write_text("one\ntwo\nthree\n")
    (workspace / "moved.txt").write_text("stays\ngoes\n")
    (workspace / "deleted.txt").write_text("bye\n")

    def script():
        (output,) = yield [patch("*** Add File: new/deep/added.txt\n+hello\n+äöü ✓")]
        holds(output, "A new/deep/added.txt")
        (output,) = yield [patch("*** Update File: changed.txt\n@@\n one\n-two\n+2\n three")]
        holds(output, "M changed.txt")
        (output,) = yield [patch("*** Update File: moved.txt\n*** Move to: new/arrived.txt\n@@\n stays\n-goes\n+comes")]
        holds(output, "Success")
        (output,) = yield [patch("*** Delete File: deleted.txt")]
        holds(output, "D deleted.txt")
        (output,) = yield [patch("*** Add File: both\n+1\n*** Update File: changed.txt\n@@\n-2\n+two again")]
        holds(output, "A both")

    scenario.turn(script())
    assert (workspace / "new/deep/added.txt").read_text() == "hello\näöü ✓\n"
    assert (workspace / "changed.txt").read_text() == "one\ntwo again\nthree\n"
    assert (workspace / "new/arrived.txt").read_text() == "stays\ncomes\n"
    assert (workspace / "both").read_text() == "1\n"
    assert not (workspace / "moved.txt").exists() and not (workspace / "deleted.txt").exists()
    if scenario.reads_messages:
        assert len(scenario.sent("fs/remove")) == 2 and not scenario.sent("process/start")


@runs
def a_patch_that_does_not_fit_changes_nothing(scenario):
    (scenario.workspace / "file").write_text("one\n")

    def script():
        (output,) = yield [patch("*** Update File: file\n@@\n-two\n+2")]
        holds(output, "Failed to find expected lines")
        (output,) = yield [patch("*** Update File: missing\n@@\n-two\n+2")]
        holds(output, "Failed to read")

    scenario.turn(script())
    assert (scenario.workspace / "file").read_text() == "one\n"
    assert not scenario.reads_messages or not scenario.sent("fs/writeFile")


@runs
def a_large_file_is_patched(scenario):
    lines = [f"line {number} of a file that takes several megabytes" for number in range(60_000)]
    (scenario.workspace / "large").write_text("\n".join(lines) + "\n")

    def script():
        (output,) = yield [patch("*** Update File: large\n@@\n-line 31000 of a file that takes several megabytes\n+changed")]
        holds(output, "M large")

    scenario.turn(script())
    lines[31000] = "changed"
    assert (scenario.workspace / "large").read_text() == "\n".join(lines) + "\n"


@runs
def modes_and_links_survive_a_patch(scenario):
    program, link = scenario.workspace / "program", scenario.workspace / "link"
    program.write_text("#!/bin/sh\necho old\n")
    program.chmod(0o755)
    link.symlink_to("program")

    def script():
        yield [patch("*** Update File: link\n@@\n-echo old\n+echo new")]
        (output,) = yield [call("exec_command", cmd="./program")]
        holds(output, "new")

    scenario.turn(script())
    assert link.is_symlink() and program.stat().st_mode & 0o777 == 0o755


@runs
def any_name_will_do(scenario):
    # What has a meaning in a URI or is none of its letters.
    scenario.workspace = scenario.workspace / "a b#c%20d?e&f;ü✓'"
    scenario.workspace.mkdir()
    name = "100% [x] #1?.txt"
    (scenario.workspace / "AGENTS.md").write_text("Say ahoy, always.\n")

    def script():
        (output,) = yield [patch(f"*** Add File: new dir/{name}\n+hello")]
        holds(output, "Success")
        (output,) = yield [call("exec_command", cmd=f"pwd; cat 'new dir/{name}'; echo more >> 'new dir/{name}'")]
        assert exited(output, 0) == f"{scenario.workspace}\nhello\n", output
        (output,) = yield [call("exec_command", cmd=f"echo out > {scenario.outside}/made")]
        exited(output, 1)

    scenario.turn(script())
    assert (scenario.workspace / "new dir" / name).read_text() == "hello\nmore\n"
    holds(first_input(scenario), "Say ahoy, always.")


@runs
def images_are_seen(scenario):
    (scenario.workspace / "dot.png").write_bytes(png(3, 2, b"\xff\x00\x00"))

    def script():
        (output,) = yield [call("view_image", path=str(scenario.workspace / "dot.png"))]
        images = [part["image_url"] for part in output if part["type"] == "input_image"]
        assert len(images) == 1, output
        kind, encoded = images[0].split(",", 1)
        assert kind == "data:image/png;base64", kind
        assert base64.b64decode(encoded) == png(3, 2, b"\xff\x00\x00")
        (output,) = yield [call("view_image", path=str(scenario.workspace / "missing.png"))]
        holds(text_of(output), "unable to locate image")

    scenario.turn(script())
    assert not scenario.reads_messages or scenario.sent("fs/readFile")


def png(width, height, colour):
    """A picture of one colour."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = (b"\x00" + colour * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@runs
def instructions_are_found(scenario):
    (scenario.workspace / "AGENTS.md").write_text("Say ahoy, always.\n")
    (scenario.workspace.parent / "AGENTS.md").write_text("Not of this project.\n")

    def script():
        return
        yield

    scenario.turn(script())
    text = first_input(scenario)
    holds(text, "Say ahoy, always.")
    lacks(text, "Not of this project.")


@runs
def overrides_of_instructions_win(scenario):
    (scenario.workspace / "AGENTS.md").write_text("Say ahoy, always.\n")
    (scenario.workspace / "AGENTS.override.md").write_text("Say nothing.\n")

    def script():
        return
        yield

    scenario.turn(script())
    text = first_input(scenario)
    holds(text, "Say nothing.")
    lacks(text, "Say ahoy, always.")


@runs
def skills_are_found(scenario):
    skill = scenario.workspace / ".agents/skills/knots"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: knots\ndescription: How to tie a bowline.\n---\nMake a loop.\n")

    def script():
        (output,) = yield [call("exec_command", cmd=f"cat {skill}/SKILL.md")]
        holds(output, "Make a loop.")

    scenario.turn(script())
    assert not scenario.reads_messages or scenario.sent("fs/walk")
    check_skills(scenario)
    # The server may be asked for them in one call; one that does not say that it can is not.
    scenario.turn(script(), options=("--enable", "executor_capability_discovery_v2"))
    check_skills(scenario)


def check_skills(scenario):
    """The model is told of the skill, not what is in it."""
    text = first_input(scenario)
    holds(text, "How to tie a bowline.")
    lacks(text, "Make a loop.")


def first_input(scenario):
    """All that the model was told at first."""
    parts = []
    for item in scenario.requests()[0]["input"]:
        for part in item.get("content", []):
            parts.append(part.get("text", ""))
    return "\n".join(parts)
