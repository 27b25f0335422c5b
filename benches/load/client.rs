//! A client that costs little: requests are made beforehand, replies are searched, not parsed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::contestants::Server;

/// One kept-alive connection.
pub(crate) struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    pub(crate) async fn open(address: &str) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, buffer: Vec::with_capacity(1 << 10) }
    }

    /// Sends a request and reads its reply: the status and the body.
    pub(crate) async fn ask(&mut self, path: &str, body: &str) -> (u16, &str) {
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        self.stream.write_all(request.as_bytes()).await.unwrap();
        self.buffer.clear();
        loop {
            let count = self.stream.read_buf(&mut self.buffer).await.unwrap();
            assert!(count > 0, "the server closed the connection");
            let Some(head) = find(&self.buffer, b"\r\n\r\n") else { continue };
            let text = std::str::from_utf8(&self.buffer[..head]).unwrap();
            let status = text[9..12].parse().unwrap();
            let length = header(text, "content-length").unwrap().parse::<usize>().unwrap();
            let (start, end) = (head + 4, head + 4 + length);
            while self.buffer.len() < end {
                let count = self.stream.read_buf(&mut self.buffer).await.unwrap();
                assert!(count > 0, "the server closed the connection");
            }
            return (status, std::str::from_utf8(&self.buffer[start..end]).unwrap());
        }
    }
}

fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len()).position(|window| window == wanted)
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| {
        let (found, value) = line.split_once(':')?;
        found.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// The number behind `"version":`.
pub(crate) fn version(body: &str) -> &str {
    let start = body.find("\"version\":").map(|at| at + 10).unwrap_or_default();
    let rest = &body[start..];
    &rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())]
}

/// What one load came to.
#[derive(Clone)]
pub(crate) struct Figures {
    pub(crate) operations: u64,
    pub(crate) errors: u64,
    pub(crate) seconds: f64,
    pub(crate) latency: Histogram<u64>,
    /// Of the server and whatever stores for it, for each operation.
    pub(crate) server_cpu_us: f64,
    pub(crate) client_cpu_us: f64,
    /// Of the whole machine: server, database and client, each with its part of the kernel.
    pub(crate) all_cpu_us: f64,
}

impl Figures {
    pub(crate) fn rate(&self) -> f64 {
        self.operations as f64 / self.seconds
    }

    pub(crate) fn percentile_ms(&self, percentile: f64) -> f64 {
        self.latency.value_at_quantile(percentile / 100.0) as f64 / 1_000.0
    }
}

/// What one connection does over and over; returns how many operations that was.
pub(crate) trait Work: Send + 'static {
    fn turn(
        &mut self,
        connection: &mut Connection,
    ) -> impl Future<Output = Result<u64, String>> + Send;
}

/// Seconds of CPU of processes, their children included.
pub(crate) fn cpu_seconds(pids: &[u32]) -> f64 {
    let ticks = |pid: &u32| -> Option<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
        // utime, stime, cutime, cstime.
        (11..15).map(|i| fields.get(i)?.parse::<f64>().ok()).sum()
    };
    pids.iter().filter_map(ticks).sum::<f64>() / 100.0
}

/// Seconds of CPU of everything on this machine.
fn machine_cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks: Vec<f64> = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|field| field.parse().ok())
        .collect();
    // user, nice, system, idle, iowait, irq, softirq.
    [0, 1, 2, 5, 6].iter().filter_map(|&i| ticks.get(i)).sum::<f64>() / 100.0
}

/// Loads servers in a closed loop; the connections are spread over them.
pub(crate) async fn load<W: Work>(
    servers: &[&Server],
    connections: usize,
    duration: Duration,
    work: impl Fn(usize) -> W,
) -> Figures {
    let (stop, errors) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut opened = Vec::new();
    for number in 0..connections {
        let server = servers[number % servers.len()];
        opened.push((Connection::open(&server.address).await, work(number)));
    }
    let own = [std::process::id()];
    let pids: Vec<u32> = servers.iter().map(|server| server.pid()).collect();
    let (server_before, own_before) = (cpu_seconds(&pids), cpu_seconds(&own));
    let all_before = machine_cpu_seconds();
    let started = Instant::now();
    let tasks: Vec<_> = opened
        .into_iter()
        .map(|(mut connection, mut work)| {
            let (stop, errors) = (Arc::clone(&stop), Arc::clone(&errors));
            tokio::spawn(async move {
                let mut latency = Histogram::<u64>::new_with_max(60_000_000, 3).unwrap();
                let mut operations = 0;
                while !stop.load(Ordering::Relaxed) {
                    let sent = Instant::now();
                    match work.turn(&mut connection).await {
                        Ok(count) => {
                            operations += count;
                            let micros = sent.elapsed().as_micros();
                            latency.saturating_record(u64::try_from(micros).unwrap());
                        }
                        Err(error) => {
                            if errors.fetch_add(1, Ordering::Relaxed) == 0 {
                                eprintln!("error: {error}");
                            }
                        }
                    }
                }
                (operations, latency)
            })
        })
        .collect();
    tokio::time::sleep(duration).await;
    stop.store(true, Ordering::Relaxed);
    let mut latency = Histogram::<u64>::new_with_max(60_000_000, 3).unwrap();
    let mut operations = 0;
    for task in tasks {
        let (count, part) = task.await.unwrap();
        operations += count;
        latency.add(part).unwrap();
    }
    let seconds = started.elapsed().as_secs_f64();
    let per_operation = |seconds: f64| seconds * 1e6 / (operations.max(1)) as f64;
    Figures {
        operations,
        errors: errors.load(Ordering::Relaxed),
        seconds,
        latency,
        server_cpu_us: per_operation(cpu_seconds(&pids) - server_before),
        client_cpu_us: per_operation(cpu_seconds(&own) - own_before),
        all_cpu_us: per_operation(machine_cpu_seconds() - all_before),
    }
}
