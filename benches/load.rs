//! Measures the service against its floor, the naive way, and what people use today.
//!
//! `cargo bench` (or `make bench`) starts each service in a process of its own on loopback, loads
//! it with a closed loop over kept-alive connections, and prints throughput, latencies, CPU and
//! ratios. All figures of one table come from one run, with the contestants taking turns: on a
//! noisy machine only the ratios mean something.
//!
//! * **floor**: the same server and handler, reading the same request and writing the same reply,
//!   without engine and store.
//! * **naive**: the same handler with one conditional statement for each request, through a pool.
//! * **redis**: the same handler with a claim script on Redis, `appendfsync always`.
//! * **etcd**: its JSON gateway: a lease, then a transaction that puts if absent.

#![expect(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    clippy::print_stdout,
    reason = "a benchmark fails by panicking, and prints"
)]

mod client {
    //! A client that costs little: requests are made beforehand, replies are searched, not parsed.

    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    use hdrhistogram::Histogram;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    /// One kept-alive connection.
    pub(crate) struct Connection {
        stream: TcpStream,
        buffer: Vec<u8>,
    }

    impl Connection {
        pub(crate) async fn open(address: &str) -> Self {
            let stream = TcpStream::connect(address).await.unwrap();
            stream.set_nodelay(true).unwrap();
            Self { stream, buffer: Vec::with_capacity(64 << 10) }
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

    /// Loads a server in a closed loop.
    pub(crate) async fn load<W: Work>(
        address: &str,
        connections: usize,
        duration: Duration,
        server_pids: &[u32],
        work: impl Fn(usize) -> W,
    ) -> Figures {
        let (stop, errors) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut opened = Vec::new();
        for number in 0..connections {
            opened.push((Connection::open(address).await, work(number)));
        }
        let own = [std::process::id()];
        let (server_before, own_before) = (cpu_seconds(server_pids), cpu_seconds(&own));
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
            server_cpu_us: per_operation(cpu_seconds(server_pids) - server_before),
            client_cpu_us: per_operation(cpu_seconds(&own) - own_before),
        }
    }
}

mod contestants {
    //! The servers, each a process: this binary with `serve STORE`, and etcd.

    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};
    use std::sync::Arc;

    use fencepost::coordinator::{Coordinator, CoordinatorOptions};
    use fencepost::http::{self, Rival};
    use fencepost::store::PgPool;
    use tokio::net::TcpListener;
    use tokio_util::sync::CancellationToken;

    const NAIVE_TABLE: &str = "
        CREATE TABLE IF NOT EXISTS naive_leases (
            key text PRIMARY KEY, owner_id text NOT NULL, version bigint NOT NULL,
            acquired_at timestamptz NOT NULL, expires_at timestamptz NOT NULL
        )";

    const NAIVE_CLAIM: &str = "
        INSERT INTO naive_leases AS l (key, owner_id, version, acquired_at, expires_at)
        VALUES ($1, $2, 1, clock_timestamp(), clock_timestamp() + $3 * interval '1 ms')
        ON CONFLICT (key) DO UPDATE
        SET owner_id = $2, version = l.version + 1, acquired_at = clock_timestamp(),
            expires_at = clock_timestamp() + $3 * interval '1 ms'
        WHERE l.expires_at <= clock_timestamp()
        RETURNING version";

    fn naive(pool: PgPool) -> Rival {
        Arc::new(move |key, owner_id, ttl| {
            let pool = pool.clone();
            Box::pin(async move {
                let claim = sqlx::query_scalar(NAIVE_CLAIM)
                    .bind(key.as_str())
                    .bind(owner_id.as_str())
                    .bind(ttl.as_millis() as f64);
                claim.fetch_optional(&pool).await.unwrap()
            })
        })
    }

    const REDIS_CLAIM: &str = "
        if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
            return redis.call('INCR', 'fence')
        end
        return nil";

    async fn redis(url: &str) -> Rival {
        let client = redis::Client::open(url).unwrap();
        let connection = client.get_multiplexed_async_connection().await.unwrap();
        let script = Arc::new(redis::Script::new(REDIS_CLAIM));
        Arc::new(move |key, owner_id, ttl| {
            let (mut connection, script) = (connection.clone(), Arc::clone(&script));
            Box::pin(async move {
                let mut claim = script.key(key.as_str());
                claim.arg(owner_id.as_str()).arg(ttl.as_millis());
                claim.invoke_async(&mut connection).await.unwrap()
            })
        })
    }

    /// What HTTP alone costs.
    fn floor() -> Rival {
        Arc::new(|_, _, _| Box::pin(async { Some(1_796_025_600_000_000) }))
    }

    /// Serves until killed; prints the address.
    pub(crate) async fn serve(database_url: &str, redis_url: Option<&str>) {
        let options = CoordinatorOptions::default();
        let metrics = Arc::clone(&options.metrics);
        let coordinator = Coordinator::open(database_url, options).await.unwrap();
        let mut rivals = vec![("/bench/floor", floor())];
        if let Some(pool) = coordinator.pool() {
            sqlx::raw_sql(NAIVE_TABLE).execute(&pool).await.unwrap();
            rivals.push(("/bench/naive", naive(pool)));
        }
        if let Some(url) = redis_url {
            rivals.push(("/bench/redis", redis(url).await));
        }
        let (router, app) = http::router_with_rivals(coordinator, metrics, rivals);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        println!("{}", listener.local_addr().unwrap());
        http::serve(listener, router, app, CancellationToken::new()).await;
    }

    /// A process that ends with this one.
    pub(crate) struct Server {
        child: Child,
        pub(crate) address: String,
        /// The processes whose CPU counts.
        pub(crate) pids: Vec<u32>,
    }

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    /// Starts this binary as a server.
    pub(crate) fn start(database_url: &str, redis_url: Option<&str>) -> Server {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["serve", database_url]).args(redis_url);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut address = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut address).unwrap();
        let pids = vec![child.id()];
        Server { child, address: address.trim().to_owned(), pids }
    }

    fn free_port() -> u16 {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    }

    /// Starts Redis with a log that is durable at every command; `None` if it is not installed.
    pub(crate) fn start_redis(directory: &std::path::Path) -> Option<Server> {
        let port = free_port().to_string();
        let child = Command::new("redis-server")
            .args(["--port", &port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes"])
            .args(["--appendfsync", "always", "--dir"])
            .arg(directory)
            .stdout(Stdio::null())
            .spawn()
            .ok()?;
        let pids = vec![child.id()];
        let server = Server { child, address: format!("127.0.0.1:{port}"), pids };
        wait_for(&server.address);
        Some(server)
    }

    /// Starts etcd; `None` if it is not installed.
    pub(crate) fn start_etcd(directory: &std::path::Path) -> Option<Server> {
        let (client, peer) = (free_port(), free_port());
        let (client_url, peer_url) =
            (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
        let child = Command::new("etcd")
            .args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url])
            .args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url])
            .args(["--initial-cluster", &format!("default={peer_url}"), "--data-dir"])
            .arg(directory.join("etcd"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let pids = vec![child.id()];
        let server = Server { child, address: format!("127.0.0.1:{client}"), pids };
        wait_for(&server.address);
        Some(server)
    }

    fn wait_for(address: &str) {
        for _ in 0..200 {
            if std::net::TcpStream::connect(address).is_ok() {
                // The port is open before the first election is over.
                std::thread::sleep(std::time::Duration::from_secs(2));
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        panic!("nothing listens on {address}");
    }
}

mod workloads {
    //! What the connections do. Every key is new unless the workload says otherwise.

    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::client::{Connection, Work, version};

    /// Numbers that no run has used before.
    #[derive(Clone, Default)]
    pub(crate) struct Fresh(Arc<AtomicU64>);

    impl Fresh {
        pub(crate) fn new() -> Self {
            let seed = std::time::UNIX_EPOCH.elapsed().unwrap().as_micros();
            Self(Arc::new(AtomicU64::new(u64::try_from(seed).unwrap() << 8)))
        }

        fn next(&self) -> u64 {
            self.0.fetch_add(1, Ordering::Relaxed)
        }

        /// Spread over the key space, as real keys are.
        fn key(&self) -> String {
            format!("{:016x}", self.next().wrapping_mul(0x9e37_79b9_7f4a_7c15))
        }
    }

    fn expect(reply: (u16, &str), outcome: &str) -> Result<(), String> {
        let wanted = format!("{{\"outcome\":\"{outcome}\"");
        if reply.0 == 200 && reply.1.starts_with(&wanted) {
            return Ok(());
        }
        Err(format!("{} {}", reply.0, reply.1))
    }

    fn claim(key: &str) -> String {
        format!(r#"{{"key":"{key}","owner_id":"bench","ttl_ms":30000}}"#)
    }

    /// Claims of free keys, by any path that takes them.
    #[derive(Clone)]
    pub(crate) struct Claims(pub(crate) &'static str, pub(crate) Fresh);

    impl Work for Claims {
        async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
            let body = claim(&self.1.key());
            expect(connection.ask(self.0, &body).await, "claimed").map(|()| 1)
        }
    }

    /// Claims of free keys among a number of known ones: most rows exist, and are free.
    #[derive(Clone)]
    pub(crate) struct Pairs(pub(crate) Fresh, pub(crate) u64);

    impl Work for Pairs {
        async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
            let key = format!("pair-{}", self.0.next().wrapping_mul(7_919) % self.1);
            let (status, body) = connection.ask("/v1/leases/claim", &claim(&key)).await;
            if body.starts_with("{\"outcome\":\"held\"") {
                return Ok(1);
            }
            expect((status, body), "claimed")?;
            let version = version(body);
            let body = format!(r#"{{"key":"{key}","owner_id":"bench","version":{version}}}"#);
            expect(connection.ask("/v1/leases/release", &body).await, "released").map(|()| 2)
        }
    }

    /// Claims of one key that is held.
    #[derive(Clone)]
    pub(crate) struct Hot;

    impl Work for Hot {
        async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
            let body = r#"{"key":"hot","owner_id":"bench","ttl_ms":3600000}"#;
            match connection.ask("/v1/leases/claim", body).await {
                (200, _) => Ok(1),
                (status, body) => Err(format!("{status} {body}")),
            }
        }
    }

    /// Renewals of a lease of one's own.
    #[derive(Clone)]
    pub(crate) struct Renewals(pub(crate) Fresh, pub(crate) Option<String>);

    impl Work for Renewals {
        async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
            if self.1.is_none() {
                let key = self.0.key();
                let (status, body) = connection.ask("/v1/leases/claim", &claim(&key)).await;
                expect((status, body), "claimed")?;
                let version = version(body);
                self.1 =
                    Some(format!(r#"{{"key":"{key}","owner_id":"bench","version":{version}}}"#));
            }
            let body = self.1.as_deref().unwrap_or_default();
            expect(connection.ask("/v1/leases/renew", body).await, "renewed").map(|()| 1)
        }
    }

    /// Executions, from claim to completion.
    #[derive(Clone)]
    pub(crate) struct Executions(pub(crate) Fresh);

    impl Work for Executions {
        async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
            let id = self.0.key();
            let body = format!(r#"{{"execution_id":"{id}","intent":"i","owner_id":"bench"}}"#);
            let (status, body) = connection.ask("/v1/executions/claim", &body).await;
            expect((status, body), "claimed")?;
            let version = version(body);
            let body = format!(
                r#"{{"execution_id":"{id}","owner_id":"bench","version":{version},"result":{{"ok":true}}}}"#
            );
            expect(connection.ask("/v1/executions/complete", &body).await, "completed").map(|()| 2)
        }
    }

    /// Claims of a hundred executions at a time.
    #[derive(Clone)]
    pub(crate) struct ExecutionsMany(pub(crate) Fresh);

    impl Work for ExecutionsMany {
        async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
            let items: Vec<String> = (0..100)
                .map(|_| {
                    let id = self.0.key();
                    format!(r#"{{"execution_id":"{id}","intent":"i","owner_id":"bench"}}"#)
                })
                .collect();
            let body = format!(r#"{{"items":[{}]}}"#, items.join(","));
            let (status, body) = connection.ask("/v1/executions/claim-many", &body).await;
            if status == 200 && body.matches("\"claimed\"").count() == 100 {
                return Ok(100);
            }
            Err(format!("{status} {body:.200}"))
        }
    }

    /// Stored responses: claim, completion, and one replay.
    #[derive(Clone)]
    pub(crate) struct Idempotency(pub(crate) Fresh);

    impl Work for Idempotency {
        async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
            let key = self.0.key();
            let claim = format!(r#"{{"key":"{key}","fingerprint":"f","owner_id":"bench"}}"#);
            let (status, body) = connection.ask("/v1/idempotency/claim", &claim).await;
            expect((status, body), "claimed")?;
            let version = version(body);
            let body = format!(
                r#"{{"key":"{key}","owner_id":"bench","version":{version},"record":{{"status":201,"content_type":"application/json","body_base64":"eyJvayI6dHJ1ZX0="}}}}"#
            );
            expect(connection.ask("/v1/idempotency/complete", &body).await, "completed")?;
            expect(connection.ask("/v1/idempotency/claim", &claim).await, "completed").map(|()| 3)
        }
    }

    /// Ticks of a leader.
    #[derive(Clone)]
    pub(crate) struct Ticks(pub(crate) usize);

    impl Work for Ticks {
        async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
            let body = format!(r#"{{"name":"leader-{0}","owner_id":"run-{0}"}}"#, self.0);
            expect(connection.ask("/v1/leaders/campaign", &body).await, "leading").map(|()| 1)
        }
    }

    /// Claims on etcd: a lease, then a put if absent under it.
    #[derive(Clone)]
    pub(crate) struct EtcdClaims(pub(crate) Fresh);

    impl Work for EtcdClaims {
        async fn turn(&mut self, connection: &mut Connection) -> Result<u64, String> {
            use base64::Engine as _;
            let (status, body) = connection.ask("/v3/lease/grant", r#"{"TTL":30}"#).await;
            let start = body.find("\"ID\":\"").ok_or_else(|| format!("{status} {body}"))? + 6;
            let id = body[start..].split('"').next().unwrap_or_default().to_owned();
            let key = base64::engine::general_purpose::STANDARD.encode(self.0.key());
            let body = format!(
                r#"{{"compare":[{{"target":"CREATE","key":"{key}","createRevision":"0"}}],"success":[{{"requestPut":{{"key":"{key}","value":"YmVuY2g=","lease":"{id}"}}}}]}}"#
            );
            match connection.ask("/v3/kv/txn", &body).await {
                (200, body) if body.contains("\"succeeded\":true") => Ok(1),
                (status, body) => Err(format!("{status} {body}")),
            }
        }
    }
}

use std::time::Duration;

use client::{Figures, load};
use contestants::{Server, start, start_etcd, start_redis};
use workloads::{
    Claims, EtcdClaims, Executions, ExecutionsMany, Fresh, Hot, Idempotency, Pairs, Renewals, Ticks,
};

/// One line of the results.
struct Line {
    name: String,
    /// One for each round.
    rounds: Vec<Figures>,
}

impl Line {
    fn median(&self, of: impl Fn(&Figures) -> f64) -> f64 {
        let mut values: Vec<f64> = self.rounds.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    }

    fn rate(&self) -> f64 {
        self.median(Figures::rate)
    }

    fn print(&self) {
        println!(
            "| {} | {:.0} | {:.2} | {:.2} | {:.2} | {:.0} | {:.0} | {} |",
            self.name,
            self.rate(),
            self.median(|figures| figures.percentile_ms(50.0)),
            self.median(|figures| figures.percentile_ms(99.0)),
            self.median(|figures| figures.percentile_ms(99.9)),
            self.median(|figures| figures.server_cpu_us),
            self.median(|figures| figures.client_cpu_us),
            self.rounds.iter().map(|figures| figures.errors).sum::<u64>(),
        );
    }
}

struct Settings {
    rounds: usize,
    duration: Duration,
    connections: usize,
    only: Option<String>,
}

/// The contestants of one table take turns, round by round.
struct Table {
    lines: Vec<Line>,
}

impl Table {
    fn new(names: &[&str]) -> Self {
        let line = |name: &&str| Line { name: (*name).to_owned(), rounds: Vec::new() };
        Self { lines: names.iter().map(line).collect() }
    }

    fn add(&mut self, name: &str, figures: Figures) {
        let line = self.lines.iter_mut().find(|line| line.name == name).unwrap();
        line.rounds.push(figures);
    }

    fn print(&self, title: &str) {
        println!("\n### {title}\n");
        println!(
            "| | operations/s | p50 ms | p99 ms | p99.9 ms | server µs CPU | client µs CPU | errors |"
        );
        println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
        for line in self.lines.iter().filter(|line| !line.rounds.is_empty()) {
            line.print();
        }
    }

    fn rate(&self, name: &str) -> f64 {
        let line = self.lines.iter().find(|line| line.name == name && !line.rounds.is_empty());
        line.map_or(f64::NAN, Line::rate)
    }

    fn ratio(&self, name: &str, to: &str) {
        let ratio = self.rate(name) / self.rate(to);
        if ratio.is_finite() {
            println!("ratio: {name} / {to} = {ratio:.2}");
        }
    }
}

async fn compare(settings: &Settings, server: &Server, kind: &str, etcd: Option<&Server>) {
    let Settings { rounds, duration, connections, .. } = *settings;
    let fresh = Fresh::new();
    let mut table = Table::new(&[
        "floor",
        "claim",
        "naive",
        "redis",
        "etcd",
        "claim + release",
        "hot key",
        "renew",
        "execution",
        "executions, 100 at a time",
        "idempotency",
        "leader tick",
    ]);
    let (address, pids) = (server.address.as_str(), server.pids.as_slice());
    macro_rules! run {
        ($name:literal, $connections:expr, $work:expr) => {
            let is_wanted = settings.only.as_deref().is_none_or(|only| $name.contains(only));
            if is_wanted || $name == "floor" {
                let figures = load(address, $connections, duration, pids, $work).await;
                table.add($name, figures);
            }
        };
    }
    for _ in 0..rounds {
        run!("floor", connections, |_| Claims("/bench/floor", fresh.clone()));
        run!("claim", connections, |_| Claims("/v1/leases/claim", fresh.clone()));
        if kind == "postgres" {
            run!("naive", connections, |_| Claims("/bench/naive", fresh.clone()));
            run!("redis", connections, |_| Claims("/bench/redis", fresh.clone()));
        }
        if let Some(etcd) = etcd
            && settings.only.is_none()
        {
            let work = |_| EtcdClaims(fresh.clone());
            table.add("etcd", load(&etcd.address, connections, duration, &etcd.pids, work).await);
        }
        run!("claim + release", connections, |_| Pairs(fresh.clone(), 100_000));
        run!("hot key", connections, |_| Hot);
        run!("renew", connections, |_| Renewals(fresh.clone(), None));
        run!("execution", connections, |_| Executions(fresh.clone()));
        run!("executions, 100 at a time", 16, |_| ExecutionsMany(fresh.clone()));
        run!("idempotency", connections, |_| Idempotency(fresh.clone()));
        run!("leader tick", connections, Ticks);
    }
    table.print(&format!("{kind}, {connections} connections"));
    println!();
    for name in ["claim", "hot key", "claim + release", "renew"] {
        table.ratio(name, "floor");
    }
    for peer in ["naive", "redis", "etcd"] {
        table.ratio("claim", peer);
    }
    table.ratio("executions, 100 at a time", "claim");
}

/// The latency of a lone client, in units of one round trip to the database.
async fn alone(server: &Server, database_url: &str) {
    use sqlx::Connection as _;
    let mut connection = sqlx::postgres::PgConnection::connect(database_url).await.unwrap();
    let fresh = Fresh::new();
    let mut units = Vec::new();
    for _ in 0..5 {
        let mut trips = Vec::new();
        for _ in 0..500 {
            let sent = std::time::Instant::now();
            let _: i32 = sqlx::query_scalar("SELECT 1").fetch_one(&mut connection).await.unwrap();
            trips.push(sent.elapsed().as_secs_f64() * 1e3);
        }
        trips.sort_by(f64::total_cmp);
        let work = |_| Claims("/v1/leases/claim", fresh.clone());
        let figures = load(&server.address, 1, Duration::from_secs(2), &server.pids, work).await;
        let (claim, trip) = (figures.percentile_ms(50.0), trips[250]);
        units.push((claim / trip, claim, trip));
    }
    units.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (ratio, claim, trip) = units[2];
    println!("\nratio: lone claim p50 / SELECT 1 p50 = {ratio:.1} ({claim:.3} ms / {trip:.3} ms)");
}

async fn run(settings: Settings, stores: &[String]) {
    let directory = tempfile::tempdir().unwrap();
    let redis = start_redis(directory.path());
    let redis_url = redis.as_ref().map(|redis| format!("redis://{}", redis.address));
    let etcd = start_etcd(directory.path());
    if redis.is_none() || etcd.is_none() {
        println!("redis-server or etcd is not installed; going on without");
    }
    for store in stores {
        let url = match store.as_str() {
            "memory" => "memory:".to_owned(),
            "sqlite" => format!("sqlite:{}", directory.path().join("bench.db").display()),
            _ => std::env::var("DATABASE_URL").expect("DATABASE_URL; run `make bench`"),
        };
        let is_postgres = store == "postgres";
        let server = start(&url, redis_url.as_deref().filter(|_| is_postgres));
        compare(&settings, &server, store, etcd.as_ref().filter(|_| is_postgres)).await;
        if is_postgres {
            alone(&server, &url).await;
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    if let [command, database_url, rest @ ..] = arguments.as_slice()
        && command == "serve"
    {
        let redis_url = rest.first().map(String::as_str);
        runtime.block_on(contestants::serve(database_url, redis_url));
        return;
    }
    let number = |name: &str, default: u64| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let settings = Settings {
        rounds: usize::try_from(number("ROUNDS", 3)).unwrap(),
        duration: Duration::from_secs(number("SECONDS", 5)),
        connections: usize::try_from(number("CONNECTIONS", 256)).unwrap(),
        only: std::env::var("ONLY").ok(),
    };
    let all = ["postgres", "sqlite", "memory"].map(str::to_owned);
    let stores = if arguments.is_empty() { &all[..] } else { &arguments[..] };
    runtime.block_on(run(settings, stores));
}
