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
