//! A search without coverage, for the stable toolchain: inputs that were judged are changed a little, again and again. It is the same
//! for the same seed, unless the target depends on threads.

use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

/// Inputs that are kept to be changed; beyond it a new one replaces an old one.
const KEPT: usize = 512;

/// Bytes of an input.
const LONGEST: usize = 2048;

/// Random numbers (SplitMix64), the same for the same seed.
#[derive(Debug, Clone)]
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// One of so many, of which there is at least one.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(count.max(1)).unwrap_or(1)).unwrap_or(0)
    }

    pub(crate) fn bytes(&mut self, most: usize) -> Vec<u8> {
        (0..self.below(most + 1)).map(|_| self.next().to_le_bytes()[0]).collect()
    }
}

/// Runs a target, which says whether an input came as far as being judged: `count` times, or for `FUZZ_SECONDS`. `FUZZ_SEED` is where
/// the numbers begin. Answers the inputs that were tried and those that were judged; a failure names its input.
pub(crate) fn search(name: &str, seeds: &[Vec<u8>], count: u64, mut target: impl FnMut(&[u8]) -> bool) -> (u64, u64) {
    let variable = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let end = variable("FUZZ_SECONDS").map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let seed = variable("FUZZ_SEED").unwrap_or(1);
    let mut numbers = Numbers::new(seed);
    let mut kept = seeds.to_vec();
    let (mut tried, mut judged) = (0, 0);
    while end.map_or(tried < count, |end| Instant::now() < end) {
        let input = if kept.is_empty() || numbers.below(8) == 0 { numbers.bytes(256) } else { change(&kept, &mut numbers) };
        let outcome = catch_unwind(AssertUnwindSafe(|| target(&input)));
        tried += 1;
        match outcome {
            Ok(false) => {}
            Ok(true) => {
                judged += 1;
                // Judged inputs are changed further; some of them make room for others.
                if kept.len() < KEPT {
                    kept.push(input);
                } else if numbers.below(16) == 0 {
                    let place = seeds.len() + numbers.below(KEPT.saturating_sub(seeds.len()));
                    if let Some(old) = kept.get_mut(place) {
                        *old = input;
                    }
                }
            }
            Err(panic) => {
                say(format_args!("{name}: input {tried} of seed {seed} fails: {input:?}"));
                resume_unwind(panic);
            }
        }
    }
    say(format_args!("{name}: {tried} inputs tried, {judged} of them judged, from seed {seed}"));
    (tried, judged)
}

fn change(kept: &[Vec<u8>], numbers: &mut Numbers) -> Vec<u8> {
    let mut input = kept[numbers.below(kept.len())].clone();
    for _ in 0..=numbers.below(4) {
        let at = numbers.below(input.len() + 1);
        let to = (at + 1 + numbers.below(8)).min(input.len());
        match numbers.below(7) {
            0 => input.truncate(at),
            1 => drop(input.drain(at..to)),
            2 => drop(input.splice(at..at, numbers.bytes(8))),
            3 => {
                let again = input[at..to].to_vec();
                drop(input.splice(at..at, again));
            }
            4 => {
                let other = &kept[numbers.below(kept.len())];
                let from = numbers.below(other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            _byte => {
                let odd = [0, 1, 0x7f, 0x80, 0xff, numbers.next().to_le_bytes()[0]];
                if let Some(byte) = input.get_mut(at) {
                    *byte = odd[numbers.below(odd.len())];
                }
            }
        }
        input.truncate(LONGEST);
    }
    input
}

/// Writes one line to standard error, also when the test harness runs the search.
fn say(line: std::fmt::Arguments<'_>) {
    let _unheard = writeln!(std::io::stderr(), "{line}");
}
