//! A program that embeds the gateway and forgets to dispatch its hidden roles: its helper is itself, from the beginning.

use portcullis_gateway::{Config, ExecServerRuntimePaths, Gateway};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let config = Config::new(ExecServerRuntimePaths::of_this_process()?);
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(Gateway::start(config))?;
    Ok(())
}
