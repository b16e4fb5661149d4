# Tries to make files set-user-ID or set-group-ID, one attempt a line: NAME OUTCOME MODE. The workspace is the working directory.
import ctypes, errno, os, platform, stat, struct, sys

libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
OLD = dict(open=2, creat=85, chmod=90, mknod=133) if X86 else {}
NEW = (
    dict(openat=257, mknodat=259, fchmod=91, fchmodat=268, linkat=265)
    if X86
    else dict(openat=56, mknodat=33, fchmod=52, fchmodat=53, linkat=37)
)
CALLS = {**OLD, **NEW, "openat2": 437, "fchmodat2": 452}
CWD, CREATE, TMPFILE, EMPTY = -100, os.O_CREAT | os.O_RDWR, os.O_TMPFILE | os.O_RDWR, 0x1000


def call(name, *args):
    plain = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    answer = libc.syscall(ctypes.c_long(CALLS[name]), *plain)
    if answer < 0:
        raise OSError(ctypes.get_errno(), name)
    return answer


def how(flags, mode):
    return ctypes.create_string_buffer(struct.pack("QQQ", flags, mode, 0), 24)


def named(descriptor, path):
    call("linkat", CWD, b"/proc/self/fd/%d" % descriptor, CWD, path, 0x400)
    os.close(descriptor)


def made(path, mode=0o755):
    os.close(os.open(path, CREATE, mode))
    return path


def held(path):
    return os.open(path, os.O_RDONLY)


def capability(path):
    # VFS_CAP_REVISION_2 and _3: CAP_SETUID, effective.
    for revision, more in ((0x02000001, b""), (0x03000001, b"\0\0\0\0")):
        try:
            os.setxattr(path, "security.capability", struct.pack("<IIIII", revision, 1 << 7, 0, 0, 0) + more)
            return
        except OSError as error:
            last = error
    raise last


def acl(path):
    # POSIX_ACL: version 2; user, group, mask and other with all rights, and nothing of a mode in it.
    entries = [(1, 7), (4, 7), (32, 7)]
    text = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", tag, rights | 0o6000, 0xFFFFFFFF) for tag, rights in entries)
    os.setxattr(path, "system.posix_acl_access", text)


def attempts(mode):
    at = lambda name: b"f%o-" % mode + name.encode()
    if X86:
        yield "chmod", at("chmod"), lambda p: call("chmod", made(p), mode)
        yield "chmod-high-bits", at("chmod-high"), lambda p: call("chmod", made(p), mode - (1 << 32))
        yield "creat", at("creat"), lambda p: call("creat", p, mode)
        yield "open", at("open"), lambda p: call("open", p, CREATE, mode)
        yield "mknod", at("mknod"), lambda p: call("mknod", p, stat.S_IFREG | mode, 0)
    yield "fchmod", at("fchmod"), lambda p: call("fchmod", held(made(p)), mode)
    yield "fchmodat", at("fchmodat"), lambda p: call("fchmodat", CWD, made(p), mode)
    yield "fchmodat2", at("fchmodat2"), lambda p: call("fchmodat2", CWD, made(p), mode, 0)
    yield "fchmodat2-empty", at("empty"), lambda p: call("fchmodat2", held(made(p)), b"", mode, EMPTY)
    yield "openat", at("openat"), lambda p: call("openat", CWD, p, CREATE, mode)
    yield "openat-tmpfile", at("tmpfile"), lambda p: named(call("openat", CWD, b".", TMPFILE, mode), p)
    yield "openat2", at("openat2"), lambda p: call("openat2", CWD, p, how(CREATE, mode), 24)
    yield "openat2-tmpfile", at("tmpfile2"), lambda p: named(call("openat2", CWD, b".", how(TMPFILE, mode), 24), p)
    yield "mknodat", at("mknodat"), lambda p: call("mknodat", CWD, p, stat.S_IFREG | mode, 0)


os.umask(0)
for mode in (0o4755, 0o2755, 0o6711):
    for name, path, act in attempts(mode):
        try:
            act(path)
            outcome = "ok"
        except OSError as error:
            outcome = errno.errorcode[error.errno]
        got = os.lstat(path).st_mode & 0o6000 if os.path.lexists(path) else 0
        print(name, outcome, oct(got))
# Calls that never set such bits, with any rights: they make files for the check of all files at the end.
for act in (
    lambda: os.mkdir("m", 0o6777),
    lambda: acl(made(b"acl")),
    lambda: capability(made(b"capability")),
    lambda: os.mkfifo("fifo", 0o6777),
):
    try:
        act()
    except OSError as error:
        pass
left = [name for name in sorted(os.listdir(".")) if os.lstat(name).st_mode & 0o6000]
capable = [name for name in os.listdir(".") if not os.path.islink(name) and "security.capability" in os.listxattr(name)]
print("left", len(left), "capable", len(capable))
