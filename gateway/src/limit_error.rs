//! Why a value of a limit is refused.

/// Why a value is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// Not a number, a fraction, negative, or larger than 64 bits.
    #[error("`{0}` is not a whole number{1} from 0 to 18446744073709551615")]
    NotWhole(String, &'static str),
    /// Too small or too large.
    #[error("{value} is not between {least} and {most}{or_zero}")]
    OutOfBounds {
        /// The given value.
        value: u64,
        /// The smallest.
        least: u64,
        /// The largest.
        most: u64,
        /// Also 0, if that means something.
        or_zero: String,
    },
}
