"""The three sandbox modes: what each refuses, beside a mode in which the same act succeeds."""

import socket

from model import call, patch
from scenario import exited, holds, lacks, runs


@runs
def read_only_changes_nothing(scenario):
    workspace = scenario.workspace
    (workspace / "file").write_text("as it was\n")

    def script():
        (output,) = yield [call("exec_command", cmd="cat file; echo more > file; echo new > new; rm file; ls")]
        said = exited(output, 0)
        holds(said, "as it was")
        holds(said, "Read-only file system")
        (output,) = yield [patch("*** Add File: patched\n+x")]
        holds(output, "rejected")

    scenario.turn(script(), sandbox="read-only")
    assert (workspace / "file").read_text() == "as it was\n"
    assert not (workspace / "new").exists() and not (workspace / "patched").exists()

    def control():
        (output,) = yield [call("exec_command", cmd="cat file; echo more > file; echo new > new")]
        exited(output, 0)
        yield [patch("*** Add File: patched\n+x")]

    scenario.turn(control(), sandbox="workspace-write")
    assert (workspace / "file").read_text() == "more\n"
    assert (workspace / "new").exists() and (workspace / "patched").exists()


@runs
def workspace_write_ends_at_the_workspace(scenario):
    inside, outside = scenario.workspace, scenario.outside
    (outside / "file").write_text("as it was\n")
    act = f"echo in > inside; echo out > {outside}/made; rm {outside}/file; mv inside {outside}/"

    def script():
        (output,) = yield [call("exec_command", cmd=f"{act}; cat {outside}/file")]
        holds(exited(output, 0), "as it was")
        holds(output, "Read-only file system")

    scenario.turn(script(), sandbox="workspace-write")
    assert (inside / "inside").read_text() == "in\n"
    assert sorted(path.name for path in outside.iterdir()) == ["file"]

    def control():
        (output,) = yield [call("exec_command", cmd=act)]
        exited(output, 0)

    scenario.turn(control(), sandbox="danger-full-access")
    assert sorted(path.name for path in outside.iterdir()) == ["inside", "made"]


@runs
def workspace_write_keeps_git_and_settings(scenario):
    workspace = scenario.workspace
    (workspace / ".codex").mkdir()
    act = "echo changed > .git/HEAD; echo '[mcp]' > .codex/config.toml; mkdir -p .agents/skills"

    def script():
        (output,) = yield [call("exec_command", cmd=f"{act}; echo done")]
        holds(output, "Read-only file system")
        holds(exited(output, 0), "done")

    scenario.turn(script(), sandbox="workspace-write")
    assert (workspace / ".git/HEAD").read_text() == "ref: refs/heads/main\n"
    assert not (workspace / ".codex/config.toml").exists() and not (workspace / ".agents/skills").exists()

    def control():
        (output,) = yield [call("exec_command", cmd=act)]
        exited(output, 0)

    scenario.turn(control(), sandbox="danger-full-access")
    assert (workspace / ".git/HEAD").read_text() == "changed\n"
    assert (workspace / ".codex/config.toml").exists() and (workspace / ".agents/skills").exists()


@runs
def a_patch_through_a_link_is_refused_by_the_server(scenario):
    (scenario.outside / "file").write_text("as it was\n")
    (scenario.workspace / "way-out").symlink_to(scenario.outside)
    act = patch("*** Add File: way-out/added\n+x"), patch("*** Update File: way-out/file\n@@\n-as it was\n+changed")

    def script():
        for one in act:
            (output,) = yield [one]
            holds(output, "Failed to write file")

    scenario.turn(script(), sandbox="workspace-write")
    assert not scenario.reads_messages or scenario.sent("fs/writeFile"), "only the server can tell"
    assert [path.read_text() for path in scenario.outside.iterdir()] == ["as it was\n"]

    def control():
        for one in act:
            (output,) = yield [one]
            holds(output, "Success")

    scenario.turn(control(), sandbox="danger-full-access")
    assert (scenario.outside / "added").read_text() == "x\n"
    assert (scenario.outside / "file").read_text() == "changed\n"


@runs
def writable_roots_are_writable(scenario):
    outside = scenario.outside

    def script():
        (output,) = yield [call("exec_command", cmd=f"echo x > {outside}/by-command")]
        exited(output, 0)
        (output,) = yield [patch(f"*** Add File: {outside}/by-patch\n+x")]
        holds(output, "Success")

    scenario.turn(script(), config=f'\n[sandbox_workspace_write]\nwritable_roots = ["{outside}"]\n')
    assert sorted(path.name for path in outside.iterdir()) == ["by-command", "by-patch"]
    for path in outside.iterdir():
        path.unlink()
    scenario.turn(script(), options=("--add-dir", str(outside)))
    assert sorted(path.name for path in outside.iterdir()) == ["by-command", "by-patch"]


@runs
def the_network_is_off_unless_it_is_asked_for(scenario):
    listener = socket.create_server(("127.0.0.1", 0))
    scenario.at_end(listener.close)
    act = f"exec 3<>/dev/tcp/127.0.0.1/{listener.getsockname()[1]} && echo connected"

    def refused():
        (output,) = yield [call("exec_command", cmd=act)]
        exited(output, 1)

    def connected():
        (output,) = yield [call("exec_command", cmd=act)]
        assert exited(output, 0) == "connected\n", output

    scenario.turn(refused(), sandbox="read-only")
    scenario.turn(refused(), sandbox="workspace-write")
    scenario.turn(connected(), sandbox="workspace-write", config="\n[sandbox_workspace_write]\nnetwork_access = true\n")
    scenario.turn(connected(), sandbox="danger-full-access")


@runs
def denied_reads_hold_for_commands_and_files(scenario):
    (scenario.workspace / "secret").mkdir()
    (scenario.workspace / "secret/key").write_text("the key\n")
    (scenario.workspace / "open").write_text("for all\n")
    (scenario.workspace / "below").mkdir()
    (scenario.workspace / "below/production.env").write_text("the password\n")
    profile = """
[permissions.careful.filesystem]
":minimal" = "read"
glob_scan_max_depth = 3

[permissions.careful.filesystem.":workspace_roots"]
"." = "write"
"secret" = "deny"
"**/*.env" = "deny"
"""

    def script():
        (output,) = yield [call("exec_command", cmd="cat open secret/key below/*.env; true")]
        holds(exited(output, 0), "for all")
        lacks(output, "the key")
        lacks(output, "the password")
        (output,) = yield [patch("*** Update File: secret/key\n@@\n-the key\n+mine")]
        lacks(output, "Success")
        (output,) = yield [patch("*** Update File: below/production.env\n@@\n-the password\n+mine")]
        lacks(output, "Success")
        (output,) = yield [patch("*** Add File: beside\n+x")]
        holds(output, "Success")

    scenario.turn(script(), sandbox=None, top='default_permissions = "careful"\n', config=profile)
    assert (scenario.workspace / "secret/key").read_text() == "the key\n"
    assert (scenario.workspace / "below/production.env").read_text() == "the password\n"

    def control():
        (output,) = yield [call("exec_command", cmd="cat open secret/key below/*.env")]
        assert exited(output, 0) == "for all\nthe key\nthe password\n", output
        (output,) = yield [patch("*** Update File: secret/key\n@@\n-the key\n+mine\n"
                                 "*** Update File: below/production.env\n@@\n-the password\n+mine")]
        holds(output, "Success")

    scenario.turn(control(), sandbox="workspace-write")
