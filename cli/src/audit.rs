//! `portcullis audit verify`: whether an audit log is as it was written.

use crate::Failure;
use crate::args::Verify;
use portcullis::{AuditFault, verify_audit};
use std::fs::File;
use std::io::{BufReader, Write};
use std::process::ExitCode;

pub(crate) fn verify(options: &Verify, out: &mut impl Write) -> Result<ExitCode, Failure> {
    let file = options.file.display();
    let log = File::open(&options.file).map_err(|error| format!("open the audit log `{file}`: {error}"))?;
    let verified = match verify_audit(BufReader::new(log), options.head.as_deref()) {
        Ok(verified) => verified,
        Err(AuditFault::Read(error)) => return Err(format!("read the audit log `{file}`: {error}").into()),
        Err(fault) => return Err(format!("{file}: {fault}").into()),
    };
    if let Some(head) = options.head.as_ref().filter(|_| !verified.has_known) {
        return Err(
            format!("{file}: no line has the digest {head}: the end of the file is missing, or it is another file").into()
        );
    }
    writeln!(out, "ok: {} lines, head {}", verified.lines, verified.head)?;
    Ok(ExitCode::SUCCESS)
}
