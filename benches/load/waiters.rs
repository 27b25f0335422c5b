//! Ten thousand calls that wait.

use std::time::{Duration, Instant};

use futures_util::future::join_all;

use crate::client::{Connection, cpu_seconds, version};
use crate::contestants::{Server, start};
use crate::report::Report;
use crate::workloads::{claim, expect};

const COUNT: usize = 10_000;
const IDLE: Duration = Duration::from_secs(10);

/// Parks the calls on as many keys as told, and frees these.
pub(crate) async fn waiters(url: &str, report: &mut Report) {
    report.say("### Postgres, 10,000 waiting calls on one replica\n");
    report.say("| | memory each | CPU while idle | release to last answer |");
    report.say("| --- | ---: | ---: | ---: |");
    for keys in [1, COUNT] {
        let server = start(url, None);
        report.say(one(&server, keys).await);
    }
    report.say("");
}

async fn one(server: &Server, keys: usize) -> String {
    let mut owner = Connection::open(&server.address).await;
    let mut held = Vec::new();
    let run = Instant::now().elapsed().as_nanos() + u128::from(std::process::id());
    for number in 0..keys {
        let key = format!("awaited-{run}-{keys}-{number}");
        let body = claim(&key).replace("30000", "600000");
        let (status, reply) = owner.ask("/v1/leases/claim", &body).await;
        expect((status, reply), "claimed").unwrap();
        held.push((key, version(reply).to_owned()));
    }
    let before = server.resident_bytes();
    let mut calls = Vec::new();
    for number in 0..COUNT {
        let (key, version) = held[number % keys].clone();
        let mut connection = Connection::open(&server.address).await;
        calls.push(tokio::spawn(async move {
            let body = format!(r#"{{"key":"{key}","version":{version},"wait_ms":50000}}"#);
            let answer = connection.ask("/v1/leases/wait", &body).await;
            expect(answer, "released").unwrap();
            Instant::now()
        }));
    }
    while server.metric("fencepost_waiters").await < COUNT as f64 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let each = (server.resident_bytes() - before) / COUNT as u64;
    let cpu_before = cpu_seconds(&[server.pid()]);
    tokio::time::sleep(IDLE).await;
    let idle = (cpu_seconds(&[server.pid()]) - cpu_before) / IDLE.as_secs_f64() * 100.0;
    // By as many connections as an owner of so many keys might have.
    let mut owners = Vec::new();
    for chunk in held.chunks(keys.div_ceil(64)) {
        owners.push((Connection::open(&server.address).await, chunk.to_vec()));
    }
    let released = Instant::now();
    join_all(owners.into_iter().map(|(mut owner, chunk)| async move {
        for (key, version) in chunk {
            let body = format!(r#"{{"key":"{key}","owner_id":"bench","version":{version}}}"#);
            expect(owner.ask("/v1/leases/release", &body).await, "released").unwrap();
        }
    }))
    .await;
    let answered = join_all(calls).await.into_iter().map(Result::unwrap).max().unwrap();
    format!(
        "| on {keys} key{} | {:.1} KiB | {idle:.1} % | {:.2} s |",
        if keys == 1 { "" } else { "s" },
        each as f64 / 1024.0,
        (answered - released).as_secs_f64(),
    )
}
