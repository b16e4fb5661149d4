//! A program that embeds the gateway and dispatches the hidden helper from its own `main`.

use portcullis_tests::{PATIENCE, Place, executable};

#[tokio::test]
async fn the_example_serves_confined_requests_from_its_own_executable() {
    let place = Place::new();
    place.put("file", "content\n");
    let example = executable("examples/embed");
    let output = tokio::process::Command::new(example).arg(place.path("")).output().await.unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stderr}");
    assert!(stdout.contains("ls says: file") && stdout.contains("a write is refused: "), "{stdout}\n{stderr}");
    assert!(!place.has("made"));
}

#[tokio::test]
async fn a_program_that_forgets_to_dispatch_is_told_and_ends() {
    // It would start itself, and that itself, and so on: this ends only because the second one refuses.
    let output = tokio::process::Command::new(executable("portcullis-forgetful")).kill_on_drop(true).output();
    let output = tokio::time::timeout(PATIENCE, output).await.unwrap().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert_eq!(stderr.matches("NotDispatched").count(), 1, "{stderr}");
}
