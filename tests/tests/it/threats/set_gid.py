# Sets the group's bit on the path in the arguments, by every call that can, and prints a line NAME OUTCOME for each.
import ctypes, errno, os, platform, sys

libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
FCHMOD, FCHMODAT, CHMOD = (91, 268, 90) if X86 else (52, 53, None)
CWD, NOFOLLOW, EMPTY = -100, 0x100, 0x1000


def call(number, *args):
    plain = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    if libc.syscall(ctypes.c_long(number), *plain) < 0:
        raise OSError(ctypes.get_errno(), "")


def held(path, flags=os.O_RDONLY):
    return os.open(path, flags)


path = os.fsencode(sys.argv[1])
parent, name = os.path.split(path)
ways = {
    "fchmod": lambda: call(FCHMOD, held(path), 0o2755),
    "fchmodat": lambda: call(FCHMODAT, CWD, path, 0o2755),
    "fchmodat-from": lambda: call(FCHMODAT, held(parent or b"."), name, 0o2755),
    "fchmodat2": lambda: call(452, CWD, path, 0o2755, 0),
    "fchmodat2-no-link": lambda: call(452, CWD, path, 0o2755, NOFOLLOW),
    "fchmodat2-empty": lambda: call(452, held(path, os.O_PATH), b"", 0o2755, EMPTY),
    # The C library uses this call for a path that must not be a link.
    "by-proc": lambda: call(FCHMODAT, CWD, b"/proc/self/fd/%d" % held(path, os.O_PATH), 0o2755),
}
if X86:
    ways["chmod"] = lambda: call(CHMOD, path, 0o2755)
for way in sys.argv[2:] or ways:
    try:
        ways[way]()
        outcome = "ok"
    except OSError as error:
        outcome = errno.errorcode[error.errno]
    try:
        bit = os.stat(path).st_mode & 0o2000
    except PermissionError:
        bit = 0
    print(way, outcome, "set" if bit else "plain")
    if bit:
        os.chmod(path, 0o755)
