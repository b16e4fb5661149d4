//! Any system call.

/// Calls with numbers and addresses; the answer, or the error.
pub(crate) fn call(number: libc::c_long, arguments: [usize; 6]) -> std::io::Result<libc::c_long> {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: syscall(2): an address among the arguments is that of a leaked string or of a leaked buffer of at least the size
    // that the row of the caller gives the kernel, so the kernel reads and writes no other memory.
    let answer = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if answer < 0 { Err(std::io::Error::last_os_error()) } else { Ok(answer) }
}
