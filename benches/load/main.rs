//! Measures the service against its floor, the naive way, and what people use today; and how it
//! stands growth and many waiting calls.
//!
//! `cargo bench` (or `make bench`) starts each server in a process of its own on loopback, loads it
//! with a closed loop over kept-alive connections, prints throughput, latencies, CPU and ratios, and
//! writes them into `docs/performance.md`. All figures of one table come from one run, with the
//! contestants taking turns: on a noisy machine only the ratios mean something.
//!
//! * **floor**: the same server and handler, reading the same request and writing the same reply,
//!   without engine and store.
//! * **naive**: the same handler with one conditional statement for each request, through a pool.
//! * **redis**: the same handler with a claim script on Redis, `appendfsync always`.
//! * **etcd**: its JSON gateway: a lease, then a transaction that puts if absent.
//!
//! With arguments, only those parts are run (`compare`, `keys`, `connections`, `replicas`,
//! `waiters`, `renewals`), and nothing is written.

#![expect(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    clippy::print_stdout,
    reason = "a benchmark fails by panicking, and prints"
)]

mod client;
mod contestants;
mod growth;
mod report;
mod waiters;
mod workloads;

use std::time::Duration;

use client::load;
use contestants::{Server, start, start_etcd, start_redis};
use report::{Report, Table};
use workloads::{
    Claims, EtcdClaims, Executions, ExecutionsMany, Fresh, Hot, Idempotency, Pairs, Renewals, Ticks,
};

/// As the service itself.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

struct Settings {
    rounds: usize,
    duration: Duration,
    connections: usize,
    /// Of renewals.
    minutes: u64,
    stores: Vec<String>,
    /// Part of the name of the workloads to run.
    only: Option<String>,
}

async fn compare(
    settings: &Settings,
    server: &Server,
    kind: &str,
    etcd: Option<&Server>,
    report: &mut Report,
) {
    let Settings { rounds, duration, connections, .. } = *settings;
    let fresh = Fresh::new();
    let mut table = Table::new(format!("{kind}, {connections} connections"));
    macro_rules! run {
        ($name:literal, $server:expr, $connections:expr, $work:expr) => {
            let is_wanted = settings.only.as_deref().is_none_or(|only| $name.contains(only));
            if is_wanted || $name == "floor" {
                table.add($name, load(&[$server], $connections, duration, $work).await);
            }
        };
    }
    for _ in 0..rounds {
        run!("floor", server, connections, |_| Claims("/bench/floor", fresh.clone()));
        run!("claim", server, connections, |_| Claims("/v1/leases/claim", fresh.clone()));
        if kind == "Postgres" {
            run!("naive", server, connections, |_| Claims("/bench/naive", fresh.clone()));
            run!("redis", server, connections, |_| Claims("/bench/redis", fresh.clone()));
        }
        if let Some(etcd) = etcd {
            run!("etcd", etcd, connections, |_| EtcdClaims(fresh.clone()));
        }
        run!("claim + release", server, connections, |_| Pairs(fresh.clone(), 100_000));
        run!("hot key", server, connections, |_| Hot);
        run!("renew", server, connections, |_| Renewals(fresh.clone(), None));
        run!("execution", server, connections, |_| Executions(fresh.clone()));
        run!("executions, 100 at a time", server, 16, |_| ExecutionsMany(fresh.clone()));
        run!("idempotency", server, connections, |_| Idempotency(fresh.clone()));
        run!("leader tick", server, connections, Ticks);
    }
    report.table(&table, Some(&kind.to_lowercase()));
    let ratios = [
        ("claim", "floor"),
        ("claim", "naive"),
        ("claim", "redis"),
        ("claim", "etcd"),
        ("hot key", "floor"),
        ("renew", "floor"),
        ("executions, 100 at a time", "claim"),
    ];
    for (name, to) in ratios {
        if let Some(ratio) = table.ratio(name, to) {
            report.say(format!("* {name} / {to} = {ratio:.2}"));
        }
    }
    report.say("");
}

/// How long the median of some calls takes.
async fn median_ms(mut call: impl AsyncFnMut()) -> f64 {
    let mut trips = Vec::new();
    for _ in 0..500 {
        let sent = std::time::Instant::now();
        call().await;
        trips.push(sent.elapsed().as_secs_f64() * 1e3);
    }
    trips.sort_by(f64::total_cmp);
    trips[trips.len() / 2]
}

/// The latency of a lone client, in units of one round trip to the database.
async fn alone(server: &Server, database_url: &str, report: &mut Report) {
    use sqlx::Connection as _;
    const PATHS: [(&str, &str); 3] =
        [("floor", "/bench/floor"), ("naive", "/bench/naive"), ("claim", "/v1/leases/claim")];
    let mut connection = sqlx::postgres::PgConnection::connect(database_url).await.unwrap();
    let pool = sqlx::PgPool::connect(database_url).await.unwrap();
    let fresh = Fresh::new();
    let mut rounds = Vec::new();
    for _ in 0..15 {
        let select = async || {
            let _: i32 = sqlx::query_scalar("SELECT 1").fetch_one(&mut connection).await.unwrap();
        };
        let mut round = vec![median_ms(select).await];
        let select = async || {
            let _: i32 = sqlx::query_scalar("SELECT 1").fetch_one(&pool).await.unwrap();
        };
        round.push(median_ms(select).await);
        for (_, path) in PATHS {
            let work = |_| Claims(path, fresh.clone());
            let figures = load(&[server], 1, Duration::from_millis(400), work).await;
            round.push(figures.percentile_ms(50.0));
        }
        rounds.push(round);
    }
    let median = |of: &dyn Fn(&Vec<f64>) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    report.say("### Postgres, a lone client\n");
    report.say("| | p50 ms | in round trips |");
    report.say("| --- | ---: | ---: |");
    let names =
        ["`SELECT 1` through sqlx", "the same through a pool, which tests the connection first"];
    for (place, name) in names.into_iter().chain(PATHS.map(|(name, _)| name)).enumerate() {
        let p50 = median(&|round| round[place]);
        let trips = median(&|round| round[place] / round[0]);
        report.say(format!("| {name} | {p50:.3} | {trips:.1} |"));
    }
    report.say("");
}

async fn run(settings: Settings, parts: &[String]) {
    let mut report = Report::default();
    let is_wanted = |part: &str| parts.is_empty() || parts.iter().any(|wanted| wanted == part);
    let database_url = std::env::var("DATABASE_URL").expect("DATABASE_URL; run `make bench`");
    if is_wanted("compare") {
        compare_all(&settings, &database_url, &mut report).await;
    }
    if is_wanted("keys") {
        growth::keys(&settings, &database_url, &mut report).await;
    }
    if is_wanted("connections") {
        growth::connections(&settings, &database_url, &mut report).await;
    }
    if is_wanted("replicas") {
        growth::replicas(&settings, &database_url, &mut report).await;
    }
    if is_wanted("waiters") {
        waiters::waiters(&database_url, &mut report).await;
    }
    if is_wanted("renewals") {
        growth::renewals(&settings, &database_url, &mut report).await;
    }
    if parts.is_empty() || std::env::var("WRITE").is_ok() {
        report.write();
    }
}

async fn compare_all(settings: &Settings, database_url: &str, report: &mut Report) {
    let directory = tempfile::tempdir().unwrap();
    let redis = start_redis(directory.path());
    let redis_url = redis.as_ref().map(|redis| format!("redis://{}", redis.address));
    let etcd = start_etcd(directory.path());
    if redis.is_none() || etcd.is_none() {
        println!("redis-server or etcd is not installed; going on without");
    }
    for store in &settings.stores {
        let sqlite = format!("sqlite:{}", directory.path().join("bench.db").display());
        let (name, url) = match store.as_str() {
            "memory" => ("memory", "memory:"),
            "sqlite" => ("SQLite", sqlite.as_str()),
            _ => ("Postgres", database_url),
        };
        let is_postgres = name == "Postgres";
        let server = start(url, redis_url.as_deref().filter(|_| is_postgres));
        if is_postgres {
            // First, so that the database is not still writing down what a heavy load left behind.
            alone(&server, url, report).await;
        }
        compare(settings, &server, name, etcd.as_ref().filter(|_| is_postgres), report).await;
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
    let stores = std::env::var("STORES").unwrap_or_else(|_| "postgres sqlite memory".to_owned());
    let settings = Settings {
        rounds: usize::try_from(number("ROUNDS", 5)).unwrap(),
        duration: Duration::from_secs(number("SECONDS", 2)),
        connections: usize::try_from(number("CONNECTIONS", 256)).unwrap(),
        minutes: number("MINUTES", 10),
        stores: stores.split_whitespace().map(str::to_owned).collect(),
        only: std::env::var("ONLY").ok(),
    };
    runtime.block_on(run(settings, &arguments));
}
