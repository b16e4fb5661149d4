//! The only unsafe code of this crate.
#![expect(unsafe_code, reason = "no crate offers the one system call of this module")]

use std::io;

/// The Landlock ABI of the running kernel.
///
/// # Errors
/// `EOPNOTSUPP`: Landlock is built in and not enabled. `ENOSYS`: it is not built in.
pub(crate) fn landlock_abi() -> io::Result<u32> {
    /// `LANDLOCK_CREATE_RULESET_VERSION` of `linux/landlock.h`.
    const VERSION: libc::c_ulong = 1;
    // SAFETY: landlock_create_ruleset(2): with this flag `attr` must be NULL and `size` 0, as they are; the call then reads
    // and writes no memory, makes no descriptor, and returns the version.
    let answer = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<libc::c_void>(), 0_usize, VERSION) };
    u32::try_from(answer).map_err(|_negative| io::Error::last_os_error())
}
