//! Writes, reads and removes a file in a directory of the server's machine, whole and in blocks.
//!
//! `portcullis serve` in one place, then `cargo run --example files -- ws://127.0.0.1:PORT /var/tmp`, with the token
//! that `serve` says in the variable EXEC_SERVER_TOKEN.

use portcullis_client::{ExecServerClient, ExecServerClientConnectOptions, Token};
use portcullis_protocol::path::WirePath;
use std::error::Error;
use std::io::{self, Write as _};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(url), Some(directory)) = (arguments.next(), arguments.next()) else {
        return Err("usage: files URL DIRECTORY".into());
    };
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run(&url, &directory))
}

async fn run(url: &str, directory: &str) -> Result<(), Box<dyn Error>> {
    let mut options = ExecServerClientConnectOptions::new(url, "files");
    options.token = std::env::var("EXEC_SERVER_TOKEN").ok().map(Token::new);
    // Open files survive a cut, if the server can do that.
    options.keep_handles = true;
    let (client, task) = ExecServerClient::connect(&options).await?;
    use_files(client, directory).await?;
    task.await?;
    Ok(())
}

async fn use_files(client: ExecServerClient, directory: &str) -> Result<(), Box<dyn Error>> {
    let path = |name: &str| WirePath::parse(&format!("{directory}/portcullis-example{name}"));
    let (folder, file, copy) = (path("")?, path("/file")?, path("/copy")?);
    client.create_directory(&folder, true, None).await?;

    let mut writer = client.create(&file, None).await?;
    for line in 0..1000 {
        writer.write(format!("line {line}\n").into_bytes()).await?;
    }
    writer.finish().await?;
    client.copy(&file, &copy, false, None).await?;

    let mut reader = client.open(&copy, None).await?;
    let mut bytes = 0;
    while let Some(block) = reader.next().await {
        bytes += block?.len();
    }
    drop(reader);
    let size = client.metadata(&copy, None).await?.size;
    let names = client.read_directory(&folder, None).await?.len();
    client.remove(&folder, true, false, None).await?;
    writeln!(io::stdout(), "{names} files, {bytes} bytes of {size} read")?;
    Ok(())
}
