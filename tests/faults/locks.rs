//! Rows that others keep locked, and callers that leave, harm nobody else.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use fencepost::coordinator::CoordinatorOptions;
use serde_json::{Value, json};
use sqlx::postgres::PgConnection;
use sqlx::{Connection as _, Executor as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use crate::rig::{self, percentile, verdict};
use crate::support::{Client, Kind, Service, World, eventually};

const LOCKED_FOR: Duration = Duration::from_secs(10);

/// Claims and releases keys of its own, at a walking pace: how long each claim took.
async fn work_elsewhere(client: Client, number: usize, end: Instant) -> Vec<Duration> {
    let mut took = Vec::new();
    while Instant::now() < end {
        // Mostly new keys, some known ones: both statements are in use.
        let key = format!("elsewhere-{number}-{}", took.len() % 50);
        let sent = Instant::now();
        let version = client.claim(&key, "worker", 30_000).await.expect("claimed").version();
        took.push(sent.elapsed());
        client.release(&key, "worker", version).await.expect("released");
        sleep(Duration::from_millis(5)).await;
    }
    took
}

/// A key that somebody else's transaction keeps locked: claims on it, one after the other, and
/// how long the slowest took to be refused.
async fn refused_claims(client: Client, key: &'static str, end: Instant) -> (usize, Duration) {
    let (mut refused, mut slowest) = (0, Duration::ZERO);
    while Instant::now() + Duration::from_secs(6) < end {
        let sent = Instant::now();
        let reply = client.claim(key, "worker", 30_000).await;
        assert_eq!((reply.status, reply.outcome()), (503, "unavailable"), "{reply:#?}");
        slowest = slowest.max(sent.elapsed());
        refused += 1;
    }
    (refused, slowest)
}

/// Runs claims on the locked key and elsewhere, while `session` has it locked.
async fn work_around(service: &Service, mut session: PgConnection, key: &'static str, what: &str) {
    let end = Instant::now() + LOCKED_FOR;
    let workers: Vec<_> = (0..8)
        .map(|number| tokio::spawn(work_elsewhere(service.client.clone(), number, end)))
        .collect();
    let blocked: Vec<_> =
        (0..4).map(|_| tokio::spawn(refused_claims(service.client.clone(), key, end))).collect();
    let mut took = Vec::new();
    for worker in workers {
        took.extend(worker.await.unwrap());
    }
    let (mut refused, mut slowest) = (0, Duration::ZERO);
    for claims in blocked {
        let (count, longest) = claims.await.unwrap();
        refused += count;
        slowest = slowest.max(longest);
    }
    session.execute("ROLLBACK").await.unwrap();
    session.close().await.unwrap();
    let freed = Instant::now();
    eventually(|| async { service.claim(key, "after", 30_000).await.outcome() == "claimed" }).await;
    let p99 = percentile(&mut took, 0.99);
    println!(
        "figure: {what} for {} s: {} claims on other keys, p50 {:.1} ms, p99 {p99:.1} ms (goal \
         100 ms: {}), at most {:.1} ms; {refused} claims on it, all 503, after {} ms at most; \
         granted {} ms after the lock was gone",
        LOCKED_FOR.as_secs(),
        took.len(),
        percentile(&mut took, 0.5),
        verdict(p99, 100.0),
        percentile(&mut took, 1.0),
        slowest.as_millis(),
        freed.elapsed().as_millis(),
    );
    assert!(p99 < 1_000.0);
    assert!(refused > 0);
    assert!(slowest <= Duration::from_secs(6));
    assert!(freed.elapsed() <= Duration::from_secs(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_is_unavailable_and_stalls_no_other() {
    let _alone = rig::alone().await;
    let service = Service::start(Kind::Postgres).await;
    let version = service.claim("locked", "a", 30_000).await.expect("claimed").version();
    service.release("locked", "a", version).await.expect("released");
    let mut session = service.world().database.as_ref().unwrap().connect().await;
    session.execute("BEGIN").await.unwrap();
    session
        .execute("SELECT * FROM fencepost.leases WHERE id LIKE '%locked' FOR UPDATE")
        .await
        .unwrap();
    work_around(&service, session, "locked", "a row locked by another session").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_insert_in_doubt_is_unavailable_and_stalls_no_other() {
    let _alone = rig::alone().await;
    let service = Service::start(Kind::Postgres).await;
    // A row like this one, of a key that is not there yet.
    let version = service.claim("like", "a", 30_000).await.expect("claimed").version();
    service.release("like", "a", version).await.expect("released");
    let mut session = service.world().database.as_ref().unwrap().connect().await;
    session.execute("BEGIN").await.unwrap();
    session
        .execute(
            "CREATE TEMP TABLE twin AS SELECT * FROM fencepost.leases WHERE id LIKE '%like';
             UPDATE twin SET id = replace(id, 'like', 'in doubt');
             INSERT INTO fencepost.leases SELECT * FROM twin",
        )
        .await
        .unwrap();
    work_around(&service, session, "in doubt", "an insert not committed by another session").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_of_a_held_key_stays_readable() {
    let _alone = rig::alone().await;
    let service = Service::start(Kind::Postgres).await;
    let version = service.claim("locked", "a", 30_000).await.expect("claimed").version();
    let mut session = service.world().database.as_ref().unwrap().connect().await;
    session.execute("BEGIN").await.unwrap();
    session
        .execute("SELECT * FROM fencepost.leases WHERE id LIKE '%locked' FOR UPDATE")
        .await
        .unwrap();
    service.claim("locked", "b", 30_000).await.expect("held");
    service.wait("locked", Some(version), 300).await.expect("timed_out");
    let sent = Instant::now();
    let (renewed, released) = tokio::join!(
        service.renew("locked", "a", version),
        service.release("locked", "a", version),
    );
    let took = sent.elapsed();
    for reply in [renewed, released] {
        assert_eq!((reply.status, reply.outcome()), (503, "unavailable"), "{reply:#?}");
    }
    session.execute("ROLLBACK").await.unwrap();
    session.close().await.unwrap();
    service.renew("locked", "a", version).await.expect("renewed");
    println!(
        "figure: a held key, locked: reads are answered; renew and release get 503 after {} ms",
        took.as_millis(),
    );
    assert!(took <= Duration::from_secs(6));
}

/// How many claims the service has handed a reply of 200 to its connection for. Those beyond what
/// callers saw crossed with their leaving: by the contract, they were received.
async fn claims_answered(client: &Client) -> usize {
    let name = concat!(
        "fencepost_http_request_duration_seconds_count",
        r#"{route="/v1/leases/claim",status="200"}"#
    );
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
    let count = client.metric(name).await as usize;
    count
}

/// What became of a call that its caller gave up.
enum Left {
    /// The reply had come before that.
    Answered(Option<i64>),
    /// Nothing had come.
    Gone,
}

fn granted(reply: &Value) -> Option<i64> {
    reply["lease"]["version"].as_i64()
}

/// Claims, and gives up after `patience` by dropping the call, which closes the connection.
async fn claim_and_drop(client: &Client, claim: &Value, patience: Duration) -> Left {
    // A connection of its own: one from a pool would be closed later or not at all.
    let client = Client::new(client.base.clone());
    match timeout(patience, client.try_post("/v1/leases/claim", claim)).await {
        Ok(reply) => Left::Answered(granted(&reply.unwrap().body)),
        Err(_) => Left::Gone,
    }
}

/// Claims, and gives up after `patience` by resetting the connection.
async fn claim_and_reset(client: &Client, claim: &Value, patience: Duration) -> Left {
    let host = client.base.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(host).await.unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_zero_linger().unwrap();
    let body = claim.to_string();
    let request = format!(
        "POST /v1/leases/claim HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len(),
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut reply = vec![0; 4_096];
    match timeout(patience, stream.read(&mut reply)).await {
        Ok(length) => {
            let text = String::from_utf8_lossy(&reply[..length.unwrap()]).into_owned();
            let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
            Left::Answered(granted(&serde_json::from_str(body).unwrap_or_default()))
        }
        Err(_) => Left::Gone,
    }
}

/// Gives up `count` claims at random moments, half of them politely; the keys of those that had
/// no reply yet.
async fn leave(
    client: &Client,
    count: usize,
    attempt: impl Fn(usize) -> Option<Uuid>,
) -> HashSet<String> {
    let calls: Vec<_> = (0..count)
        .map(|number| {
            let (client, key) = (client.clone(), format!("left-{number}"));
            let attempt_id = attempt(number);
            tokio::spawn(async move {
                sleep(Duration::from_millis(rand::random_range(0..1_500))).await;
                let patience = Duration::from_micros(rand::random_range(0..30_000));
                let claim = json!({"key": key, "owner_id": "left", "ttl_ms": 60_000,
                                   "attempt_id": attempt_id});
                let left = if number.is_multiple_of(2) {
                    claim_and_drop(&client, &claim, patience).await
                } else {
                    claim_and_reset(&client, &claim, patience).await
                };
                match left {
                    Left::Gone => Some(key),
                    Left::Answered(Some(version)) => {
                        client.release(&key, "left", version).await.expect("released");
                        None
                    }
                    Left::Answered(None) => panic!("a new key was not granted"),
                }
            })
        })
        .collect();
    let mut gone = HashSet::new();
    for call in calls {
        gone.extend(call.await.unwrap());
    }
    gone
}

async fn leaves_no_lease_behind(kind: Kind) {
    let _alone = rig::alone().await;
    let world = World::new(kind).await;
    // Writes take a while, so that many callers leave in the middle of one.
    let delay = Duration::from_millis(30);
    let service = rig::slow_replica(&world, &CoordinatorOptions::default(), delay).await;
    let gone = leave(&service, 500, |_| None).await;

    let started = Instant::now();
    let good = (0..200).map(|number| {
        let client = service.client.clone();
        tokio::spawn(async move {
            client.claim(&format!("good-{number}"), "good", 30_000).await.expect("claimed");
        })
    });
    for claim in good.collect::<Vec<_>>() {
        claim.await.unwrap();
    }
    let good_took = started.elapsed();
    let mut in_transaction = 0;
    if let Some(database) = &world.database {
        in_transaction = database
            .number(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                 AND state LIKE 'idle in transaction%' AND state_change < now() - interval '1 s'",
            )
            .await;
    }

    // Long before their ttl of a minute, the keys of those who left are free again.
    let mut held: Vec<&String> = gone.iter().collect();
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut seen = 500 - gone.len() + 200;
    while !held.is_empty() && Instant::now() < deadline {
        let mut still = Vec::new();
        for key in held {
            let reply = service.claim(key, "next", 30_000).await;
            seen += usize::from(reply.status == 200);
            if reply.outcome() != "claimed" {
                still.push(key);
            }
        }
        held = still;
    }
    let crossed = claims_answered(&service).await - seen;
    let undone = service.metric("fencepost_undone_grants_total").await;
    println!(
        "figure: {kind:?}: of 500 claims given up after 0 to 30 ms, {} had no reply; {undone} \
         grants were taken back, {crossed} replies crossed with the leaving, {} keys stayed held; \
         then 200 good claims in {} ms, {in_transaction} sessions idle in transaction",
        gone.len(),
        held.len(),
        good_took.as_millis(),
    );
    assert!(gone.len() >= 100 && undone > 0.0, "too few left in time to prove anything");
    assert!(held.len() <= crossed, "held for nobody: {held:?}");
    assert!(crossed <= gone.len() / 3, "the service does not notice that callers leave");
    assert_eq!(in_transaction, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_leaves_leaves_no_lease_behind_on_memory() {
    leaves_no_lease_behind(Kind::Memory).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_leaves_leaves_no_lease_behind_on_sqlite() {
    leaves_no_lease_behind(Kind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_leaves_leaves_no_lease_behind_on_postgres() {
    leaves_no_lease_behind(Kind::Postgres).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_comes_back_with_its_attempt_finds_its_grant() {
    let _alone = rig::alone().await;
    let world = World::new(Kind::Postgres).await;
    let delay = Duration::from_millis(30);
    let service = rig::slow_replica(&world, &CoordinatorOptions::default(), delay).await;
    let attempts: Vec<Uuid> = (0..200).map(|_| Uuid::new_v4()).collect();
    let gone = leave(&service, attempts.len(), |number| Some(attempts[number])).await;
    let (mut found, mut fresh) = (0, 0);
    for (number, attempt_id) in attempts.iter().enumerate() {
        let key = format!("left-{number}");
        if !gone.contains(&key) {
            continue;
        }
        let before = service.state(&key).await;
        let claim = json!({"key": key, "owner_id": "left", "ttl_ms": 60_000,
                           "attempt_id": attempt_id});
        let again = service.post("/v1/leases/claim", claim).await.expect("claimed");
        if before["state"] == "held" {
            assert_eq!(again.body["repeated"], true);
            assert_eq!(again.version(), before["version"].as_i64().unwrap());
            found += 1;
        } else {
            fresh += 1;
        }
        service.claim(&key, "next", 30_000).await.expect("held");
    }
    println!(
        "figure: of {} claims with an attempt_id that were given up, {found} found their grant on \
         coming back, {fresh} got a new one",
        gone.len(),
    );
    assert!(found > 10, "too few grants were left to prove anything");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_leaves_the_line_passes_its_turn_on() {
    let _alone = rig::alone().await;
    let service = Service::start(Kind::Postgres).await;
    let (mut longest, mut left, mut stuck, mut seen) = (Duration::ZERO, 0, 0, 0);
    for _ in 0..100 {
        let version = service.claim("k", "holder", 30_000).await.expect("claimed").version();
        let claim = |owner: &str| {
            let claim = json!({"key": "k", "owner_id": owner, "ttl_ms": 30_000, "wait_ms": 20_000});
            let client = Client::new(service.base.clone());
            tokio::spawn(async move { client.post("/v1/leases/claim", claim).await })
        };
        let first = claim("first");
        service.until_waiters(1).await;
        let second = claim("second");
        service.until_waiters(2).await;
        // The one at the head leaves about when its turn comes.
        let leaving = async {
            sleep(Duration::from_micros(rand::random_range(0..6_000))).await;
            first.abort();
            first.await
        };
        let releasing = async {
            service.release("k", "holder", version).await.expect("released");
            Instant::now()
        };
        let (first, released) = tokio::join!(leaving, releasing);
        seen += 2;
        match first {
            // It was granted before it could leave.
            Ok(reply) => {
                let version = reply.expect("claimed").version();
                service.release("k", "first", version).await.expect("released");
                seen += 1;
            }
            Err(_) => left += 1,
        }
        tokio::pin!(second);
        let second = match timeout(Duration::from_secs(1), &mut second).await {
            Ok(second) => {
                longest = longest.max(released.elapsed());
                second
            }
            // Its reply may have crossed with its leaving.
            Err(_) => {
                stuck += 1;
                let state = service.state("k").await;
                assert_eq!(state["owner_id"], "first", "nobody was granted the key: {state}");
                let version = state["version"].as_i64().unwrap();
                service.release("k", "first", version).await.expect("released");
                second.await
            }
        };
        let second = second.unwrap().expect("claimed");
        service.release("k", "second", second.version()).await.expect("released");
    }
    let crossed = claims_answered(&service).await - seen;
    println!(
        "figure: the head of a line left about when its turn came, 100 rounds, {left} left before \
         a reply: the next one was granted within {} ms (bound 1,000 ms), but for {stuck} \
         ({crossed} replies crossed with the leaving)",
        longest.as_millis(),
    );
    assert!(left >= 20, "too few left to prove anything");
    assert!(stuck <= crossed, "the turn was not passed on");
    assert!(crossed <= 20, "the service does not notice that callers leave");
}
