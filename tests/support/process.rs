//! The real binary, in a process of its own.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::Client;

/// A running `fencepost serve`.
pub struct Process {
    child: Child,
    pub client: Client,
    /// What it printed before it was ready.
    pub greeting: String,
}

/// The binary with nothing of this process' environment that it would read.
pub fn fencepost(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fencepost"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("FENCEPOST_")) {
        command.env_remove(name);
    }
    command.args(arguments).stdin(Stdio::null());
    command
}

impl Process {
    /// Starts it on a free port and waits until it listens.
    pub fn start(database_url: &str, arguments: &[&str]) -> Self {
        Self::start_with_log(database_url, arguments, Stdio::inherit())
    }

    /// The same, with its log going to `log`.
    pub fn start_with_log(database_url: &str, arguments: &[&str], log: Stdio) -> Self {
        let mut child = fencepost(&["serve", "--database-url", database_url])
            .args(["--listen", "127.0.0.1:0"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut greeting = String::new();
        let mut base = None;
        for line in lines.by_ref().take(4) {
            let line = line.unwrap();
            let word = line.split(' ').find(|word| word.starts_with("http://"));
            base = base.or(word.map(str::to_owned));
            greeting += &line;
            greeting.push('\n');
        }
        let base = base.unwrap_or_else(|| panic!("it did not start: {greeting}"));
        Self { child, client: Client::new(base), greeting }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal, as in `kill -TERM`.
    pub fn signal(&self, signal: &str) {
        let id = self.id().to_string();
        let status = Command::new("kill").args([&format!("-{signal}"), &id]).status();
        assert!(status.unwrap().success());
    }

    /// Kills it without warning and waits until it is gone.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until it ends by itself.
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "it did not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl std::ops::Deref for Process {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a command to its end: its exit code, and what it wrote to standard output and error.
pub fn run(command: &mut Command) -> (Option<i32>, String, String) {
    let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}
