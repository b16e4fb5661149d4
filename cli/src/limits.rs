//! The flags of the bounds that an operator may set: one for each of [`LIMITS`].

use clap::{Arg, ArgMatches, Args, Command, Error, FromArgMatches, Id};
use portcullis::{Config, LIMITS, Limit};

/// The limits that were given, in any order.
#[derive(Debug, Default)]
pub(crate) struct Limits(Vec<(&'static Limit, u64)>);

impl Limits {
    /// Sets them.
    pub(crate) fn apply(&self, config: &mut Config) -> Result<(), String> {
        let set = |(limit, value): &(&Limit, u64)| limit.set(config, *value).map_err(|error| format!("{}: {error}", limit.name));
        self.0.iter().try_for_each(set)
    }
}

impl Args for Limits {
    fn augment_args(command: Command) -> Command {
        command.next_help_heading("Limits").args(LIMITS.iter().map(flag))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }

    fn group_id() -> Option<Id> {
        None
    }
}

impl FromArgMatches for Limits {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let given = |limit: &'static Limit| matches.get_one::<u64>(limit.name).map(|value| (limit, *value));
        Ok(Self(LIMITS.iter().filter_map(given).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn flag(limit: &'static Limit) -> Arg {
    let parse = move |text: &str| limit.parse(text).map_err(|error| error.to_string());
    Arg::new(limit.name)
        .long(limit.name)
        .value_name(limit.unit.name())
        .allow_negative_numbers(true)
        .value_parser(parse)
        .help(format!("{} [default: {}]", limit.about, limit.default_value()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows of the page that tells operators of the limits.
    fn row(limit: &Limit) -> String {
        let of_zero = limit.zero.map(|means| format!(", or 0: {means}")).unwrap_or_default();
        let bounds = format!("{} to {}{of_zero}", limit.least, limit.most);
        format!("| `{}` | {} | {bounds} | {} |", limit.name, limit.default_value(), limit.about)
    }

    #[test]
    fn the_page_of_limits_has_a_row_for_each() {
        let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/limits.md")).unwrap();
        let missing: Vec<String> = LIMITS.iter().map(row).filter(|row| !page.contains(row.as_str())).collect();
        assert!(missing.is_empty(), "docs/limits.md lacks these rows:\n{}", missing.join("\n"));
    }
}
