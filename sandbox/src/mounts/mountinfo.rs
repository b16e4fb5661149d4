//! The mounts of this process, as the kernel lists them (`proc_pid_mountinfo(5)`).

use super::MountError;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

const FILE: &str = "/proc/self/mountinfo";

/// One mount: `36 35 98:0 /root /mount/point options [optional fields] - type source options`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Line<'a> {
    number: &'a [u8],
    parent: &'a [u8],
    pub(super) device: &'a [u8],
    place: &'a [u8],
    options: &'a [u8],
    pub(super) kind: &'a [u8],
    settings: &'a [u8],
}

/// The whole list.
pub(super) fn read() -> Result<Vec<u8>, MountError> {
    std::fs::read(FILE).map_err(|error| MountError {
        attempt: format!("read {FILE} for the mounts of this process; mount /proc"),
        errno: error.raw_os_error().unwrap_or(0),
    })
}

impl<'a> Line<'a> {
    /// Parses one line. `None` if it is malformed.
    pub(super) fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let (number, parent) = (fields.next()?, fields.next()?);
        let device = fields.next()?;
        let place = fields.nth(1)?;
        let options = fields.next()?;
        let mut fields = fields.skip_while(|field| *field != b"-");
        let kind = fields.nth(1)?;
        let settings = fields.nth(1).unwrap_or_default();
        Some(Self { number, parent, device, place, options, kind, settings })
    }

    /// The mount id, `stx_mnt_id` of statx(2).
    pub(super) fn number(&self) -> Option<u64> {
        std::str::from_utf8(self.number).ok()?.parse().ok()
    }

    /// The id of the mount on which it is mounted.
    pub(super) fn parent(&self) -> Option<u64> {
        std::str::from_utf8(self.parent).ok()?.parse().ok()
    }

    /// The path of the mount point.
    pub(super) fn path(&self) -> PathBuf {
        PathBuf::from(OsString::from_vec(unescape(self.place)))
    }

    /// The id of the user that mounted a FUSE file system, which may be any user of the machine (fusermount(1)).
    pub(super) fn user(&self) -> Option<u32> {
        let mut settings = self.settings.split(|byte| *byte == b',');
        let user = settings.find_map(|setting| setting.strip_prefix(b"user_id="))?;
        std::str::from_utf8(user).ok()?.parse().ok()
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.options.split(|byte| *byte == b',').any(|option| option == b"ro")
    }
}

/// Decodes space, tab, line feed and backslash, which are written as a backslash and three octal digits.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, after @ ..] = rest {
        let code = match (first, after) {
            (b'\\', [high @ b'0'..=b'3', middle @ b'0'..=b'7', low @ b'0'..=b'7', ..]) => {
                Some(((high - b'0') << 6) | ((middle - b'0') << 3) | (low - b'0'))
            }
            _plain => None,
        };
        plain.push(code.unwrap_or(*first));
        rest = if code.is_some() { after.get(3..).unwrap_or_default() } else { after };
    }
    plain
}
