//! libFuzzer on one target, which the variable `TARGET` names. See README.md.

#![no_main]

mod reference;
mod relay;
mod targets;

use std::sync::LazyLock;

static TARGET: LazyLock<targets::Target> = LazyLock::new(|| {
    let name = std::env::var("TARGET").unwrap_or_default();
    let known = targets::TARGETS.iter().find(|(known, _)| *known == name);
    let names = targets::TARGETS.map(|(known, _)| known).join(", ");
    known.unwrap_or_else(|| panic!("TARGET is `{name}`: name one of {names}")).1
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    TARGET(data);
});
