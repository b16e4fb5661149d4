//! System calls by number.

use std::ffi::{CStr, CString};

/// The error number of the last call, or 0 if it answered.
fn errno(answer: libc::c_long) -> i32 {
    if answer >= 0 { 0 } else { std::io::Error::last_os_error().raw_os_error().unwrap_or(-1) }
}

/// Calls with plain numbers.
pub(crate) fn call(number: libc::c_long, args: [usize; 5]) -> i32 {
    let [a, b, c, d, e] = args;
    // SAFETY: syscall(2): the callers give numbers only, with null where the call takes a pointer that may be null, or where
    // the kernel answers EFAULT before it writes.
    errno(unsafe { libc::syscall(number, a, b, c, d, e) })
}

/// Calls with a path in the second argument and a second string in the third.
pub(crate) fn call_on(number: libc::c_long, path: &str, name: &CStr, rest: [usize; 3]) -> i32 {
    let path = CString::new(path).expect("no NUL");
    let [c, d, e] = rest;
    // SAFETY: syscall(2): both strings end in NUL and live through the call; the rest are numbers or null.
    errno(unsafe { libc::syscall(number, libc::AT_FDCWD, path.as_ptr(), c, name.as_ptr(), d, e) })
}

/// Sets a user attribute, through the libc call.
pub(crate) fn setxattr(path: &str) -> i32 {
    let path = CString::new(path).expect("no NUL");
    // SAFETY: setxattr(2): path and name end in NUL; the value has the length given.
    let answer = unsafe { libc::setxattr(path.as_ptr(), c"user.probe".as_ptr(), c"v".as_ptr().cast(), 1, 0) };
    errno(answer.into())
}

/// The same by `setxattrat`, which takes the value by way of a structure.
pub(crate) fn setxattrat(path: &str) -> i32 {
    /// `struct xattr_args` of `linux/xattr.h`.
    #[repr(C)]
    struct Value {
        value: *const u8,
        size: u32,
        flags: u32,
    }
    let path = CString::new(path).expect("no NUL");
    let value = Value { value: c"v".as_ptr().cast(), size: 1, flags: 0 };
    let (path, name, size) = (path.as_ptr(), c"user.probe".as_ptr(), size_of::<Value>());
    // SAFETY: setxattrat: path and name end in NUL; the structure has the length given, and its value the one that it says.
    errno(unsafe { libc::syscall(463, libc::AT_FDCWD, path, 0, name, &raw const value, size) })
}

/// Changes a mode by `fchmodat2`.
pub(crate) fn fchmodat2(path: &str) -> i32 {
    let path = CString::new(path).expect("no NUL");
    // SAFETY: fchmodat2: the path ends in NUL and lives through the call; the rest are numbers.
    errno(unsafe { libc::syscall(452, libc::AT_FDCWD, path.as_ptr(), 0o640, 0) })
}

/// Opens a file by `openat2`, which takes flags and mode from memory. The descriptor stays open.
pub(crate) fn openat2(path: &str) -> i32 {
    let path = CString::new(path).expect("no NUL");
    // `struct open_how` of `linux/openat2.h`: flags (O_RDONLY), mode and ways to resolve.
    let how = [0_u64; 3];
    let size = size_of_val(&how);
    // SAFETY: openat2(2): the path ends in NUL, and the structure has the length given.
    errno(unsafe { libc::syscall(libc::SYS_openat2, libc::AT_FDCWD, path.as_ptr(), how.as_ptr(), size) })
}

/// Sets the attributes of an inode to what they are, by `file_getattr` and `file_setattr`.
pub(crate) fn keep_attributes(path: &str) -> i32 {
    let path = CString::new(path).expect("no NUL");
    // `struct file_attr` of `linux/fs.h`, in its first version.
    let mut attributes = [0_u64; 3];
    let size = size_of_val(&attributes);
    // SAFETY: file_getattr writes as many bytes as are given: the buffer has them.
    let _zeros_if_refused =
        errno(unsafe { libc::syscall(468, libc::AT_FDCWD, path.as_ptr(), attributes.as_mut_ptr(), size, 0_usize) });
    // SAFETY: file_setattr reads as many bytes as are given: the buffer has them.
    errno(unsafe { libc::syscall(469, libc::AT_FDCWD, path.as_ptr(), attributes.as_ptr(), size, 0_usize) })
}

/// Sets the flags of an inode to what they are.
pub(crate) fn keep_flags(descriptor: std::os::fd::RawFd) -> i32 {
    let mut flags: libc::c_long = 0;
    // FS_IOC_GETFLAGS and FS_IOC_SETFLAGS
    for request in [0x8008_6601, 0x4008_6602] {
        // SAFETY: ioctl(2): both take a pointer to a number, which is valid for reading and writing.
        let answer = errno(unsafe { libc::ioctl(descriptor, request, &raw mut flags) }.into());
        if answer != 0 {
            return answer;
        }
    }
    0
}

/// One byte of the memory of another process, at an address where it has none: EFAULT says that the kernel looked.
pub(crate) fn process_vm(number: libc::c_long, pid: usize) -> i32 {
    let mut byte = 0_u8;
    let own = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let other = libc::iovec { iov_base: std::ptr::without_provenance_mut(1), iov_len: 1 };
    // SAFETY: process_vm_readv(2): the own vector is one valid byte; the other's address is not looked at by this process.
    errno(unsafe { libc::syscall(number, pid, &raw const own, 1_usize, &raw const other, 1_usize, 0_usize) })
}

/// `getpid` of the 32-bit table.
#[cfg(target_arch = "x86_64")]
pub(crate) fn int80() -> i32 {
    let answer: i32;
    // SAFETY: the call takes nothing and changes nothing but eax, and on old kernels the registers named.
    unsafe {
        std::arch::asm!("int 0x80", inlateout("eax") 20 => answer, out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
    if answer > 0 { 0 } else { -answer }
}

/// A request on a descriptor, with a number of zero where the request takes a pointer.
pub(crate) fn ioctl(descriptor: std::os::fd::RawFd, request: libc::c_ulong) -> i32 {
    let mut number: libc::c_long = 0;
    // SAFETY: ioctl(2): each request of the callers reads or writes one number through the pointer, or ignores it.
    errno(unsafe { libc::ioctl(descriptor, request, &raw mut number) }.into())
}

/// A lease for reading.
pub(crate) fn set_lease(descriptor: std::os::fd::RawFd) -> i32 {
    // SAFETY: fcntl(2): F_SETLEASE takes a number.
    errno(unsafe { libc::fcntl(descriptor, libc::F_SETLEASE, libc::F_RDLCK) }.into())
}

/// How long what is written to the inode will live.
pub(crate) fn set_hint(descriptor: std::os::fd::RawFd) -> i32 {
    /// `F_SET_RW_HINT` of `linux/fcntl.h`.
    const SET_HINT: libc::c_int = 1036;
    let short: u64 = 2;
    // SAFETY: fcntl(2): F_SET_RW_HINT reads 64 bits through the pointer, which is valid for them.
    errno(unsafe { libc::fcntl(descriptor, SET_HINT, &raw const short) }.into())
}
