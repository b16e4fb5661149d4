//! User ids of the machine that an operator sets aside for sandboxes.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Below are the ids of users and services, and those of 16 bits, of which 65,534 stands for ids that are not known.
const LEAST: u32 = 1 << 16;

/// Above are the last one, and the id that means none (`(uid_t) -1`).
const MOST: u32 = u32::MAX - 2;

/// Bound of the ids of a range: as many as a server has sandboxes at the most.
const MOST_IDS: u32 = 1 << 20;

/// What switches it off.
const NONE: &str = "none";

/// Ids from the first to the last, each of which is user and group of one sandbox at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct UidRange {
    first: u32,
    last: u32,
}

/// Why a text is not a range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is not a range of user ids: write FIRST-LAST, both from {LEAST} to {MOST}, of {MOST_IDS} ids at the most, or {NONE}"
)]
pub struct WrongRange {
    text: String,
}

impl UidRange {
    /// Where systemd, the distributions and the services that make ids for users of a directory assign none: above what container
    /// runtimes and `sssd` use (524,288 to 2,000,200,000), below the ids of foreign images (2,147,352,576).
    pub const DEFAULT: Self = Self { first: 2_140_000_000, last: 2_140_065_535 };

    /// Of `FIRST-LAST`; none of `none`.
    ///
    /// # Errors
    /// It is neither.
    pub fn parse(text: &str) -> Result<Option<Self>, WrongRange> {
        if text == NONE {
            return Ok(None);
        }
        let wrong = || WrongRange { text: text.to_owned() };
        let (first, last) = text.split_once('-').ok_or_else(wrong)?;
        let id = |text: &str| text.parse::<u32>().ok().filter(|id| (LEAST..=MOST).contains(id)).ok_or_else(wrong);
        let (first, last) = (id(first)?, id(last)?);
        if last.checked_sub(first).is_some_and(|more| more < MOST_IDS) { Ok(Some(Self { first, last })) } else { Err(wrong()) }
    }

    /// How many ids there are.
    #[must_use]
    pub fn count(self) -> u32 {
        self.last - self.first + 1
    }

    /// The id at an index, which counts on from the first one behind the last.
    #[must_use]
    pub fn at(self, index: u32) -> u32 {
        self.first + index % self.count()
    }

    /// Whether an id is one of them.
    #[must_use]
    pub fn contains(self, id: u32) -> bool {
        (self.first..=self.last).contains(&id)
    }
}

impl fmt::Display for UidRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_two_ids_that_belong_to_no_user() {
        assert_eq!(UidRange::parse("none"), Ok(None));
        let range = UidRange::parse("100000-100002").unwrap().unwrap();
        assert_eq!((range.count(), range.to_string().as_str()), (3, "100000-100002"));
        assert_eq!([0, 1, 2, 3].map(|index| range.at(index)), [100_000, 100_001, 100_002, 100_000]);
        assert_eq!([99_999, 100_000, 100_002, 100_003].map(|id| range.contains(id)), [false, true, true, false]);
        assert_eq!(UidRange::parse("4294967293-4294967293").unwrap().unwrap().count(), 1);
        assert_eq!(UidRange::parse(&UidRange::DEFAULT.to_string()), Ok(Some(UidRange::DEFAULT)));
        for text in [
            "",
            "0",
            "none-1",
            "1-2",
            "0-70000",
            "65535-65536",
            "100002-100000",
            "100000-4294967295",
            "4294967294-4294967294",
            "100000-9999999",
            "-",
        ] {
            let error = UidRange::parse(text).unwrap_err().to_string();
            assert!(error.contains(&format!("`{text}`")) && error.contains("FIRST-LAST"), "{error}");
        }
    }
}
