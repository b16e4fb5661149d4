//! A client of ours for `tests/client`, which runs it against executors of others: `portcullis-interop URL ENVIRONMENT FOLDER STEP`,
//! the token in `PORTCULLIS_HARNESS_TOKEN`. Before each part it says a line and waits for one, so that the suite can place cuts.

use portcullis_client::{ExecServerClient, ExecServerClientConnectOptions, ProcessEvent, RemoteExecServerConnectArgs, Token};
use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::process::StartParams;
use std::error::Error;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, environment, folder, step] = arguments.try_into().map_err(|_| "arguments: URL ENVIRONMENT FOLDER STEP")?;
    let token = Token::new(std::env::var("PORTCULLIS_HARNESS_TOKEN")?);
    let remote = RemoteExecServerConnectArgs { base_url: url, environment_id: environment, token };
    let options = ExecServerClientConnectOptions::remote(remote, "portcullis-interop");
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(run(&options, &PathBuf::from(folder), &step))
}

async fn run(options: &ExecServerClientConnectOptions, folder: &Path, step: &str) -> Outcome {
    let (client, task) = ExecServerClient::connect(options).await?;
    match step {
        "files" => files(&client, folder).await?,
        "output" => output(&client, folder).await?,
        "input" => input(&client, folder).await?,
        other => return Err(format!("no step {other}").into()),
    }
    drop(client);
    task.await?;
    writeln!(io::stdout(), "done")?;
    Ok(())
}

/// Says where it is and waits for the suite.
fn pause(at: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{at}")?;
    io::stdout().flush()?;
    io::stdin().read_line(&mut String::new()).map(drop)
}

fn path(folder: &Path, name: &str) -> Outcome<WirePath> {
    Ok(WirePath::Local(AbsolutePath::new(folder.join(name))?))
}

/// 5 MiB there and back.
async fn files(client: &ExecServerClient, folder: &Path) -> Outcome {
    let content: Vec<u8> = (0..5_u32 << 20).map(|nth| nth.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    let file = path(folder, "five-mib")?;
    pause("write")?;
    client.write_file(&file, content.clone(), None).await?;
    pause("read")?;
    let read = client.read_file(&file, None).await?;
    if read == content { Ok(()) } else { Err(format!("{} bytes came back, and they are others", read.len()).into()) }
}

/// Every byte of a process's output, once and in order.
async fn output(client: &ExecServerClient, folder: &Path) -> Outcome {
    let mut process = client.start(&params(folder, "out", "read -r go <gate; seq 1 20000; exit 4")?).await?;
    pause("started")?;
    let finished = process.wait(1 << 20).await?;
    let expected: String = (1..=20_000).map(|nth| format!("{nth}\n")).collect();
    if (finished.code, finished.is_whole) != (4, true) || finished.stdout != expected.as_bytes() {
        return Err(format!("status {}, {} bytes", finished.code, finished.stdout.len()).into());
    }
    Ok(())
}

/// Every line of input is read once.
async fn input(client: &ExecServerClient, folder: &Path) -> Outcome {
    let mut params = params(folder, "in", "while read -r line; do echo \"got $line\"; done")?;
    params.pipe_stdin = true;
    let mut process = client.start(&params).await?;
    let (mut input, mut events) = (process.take_input().ok_or("input")?, process.take_events().ok_or("events")?);
    let mut heard = String::new();
    for nth in 1..=4 {
        pause("line")?;
        input.write(format!("{nth}\n").into_bytes()).await?;
        while heard.lines().count() < nth || !heard.ends_with('\n') {
            match events.next().await {
                Some(ProcessEvent::Output { chunk, .. }) => heard.push_str(std::str::from_utf8(&chunk)?),
                other => return Err(format!("{other:?} after {heard:?}").into()),
            }
        }
    }
    process.terminate().await?;
    if heard == "got 1\ngot 2\ngot 3\ngot 4\n" { Ok(()) } else { Err(format!("{heard:?}").into()) }
}

fn params(folder: &Path, id: &str, script: &str) -> Outcome<StartParams> {
    let words = ["sh", "-c", script].map(str::to_owned).to_vec();
    Ok(StartParams::new(id, words, path(folder, "")?))
}
