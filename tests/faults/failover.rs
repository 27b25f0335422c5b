//! A standby takes over, with the old primary still there and then gone.

use std::time::Instant;

use sqlx::Connection as _;
use sqlx::postgres::PgConnection;

use crate::crashes::Server;
use crate::rig;
use crate::support::eventually;
use crate::support::process::Process;

/// The service is given both servers, the standby first. After the promotion the old primary still
/// answers, and must not be written to once the new one is known of.
#[tokio::test(flavor = "multi_thread")]
async fn the_primary_is_followed_and_versions_rise_over_a_failover() {
    let _alone = rig::alone().await;
    let primary = Server::start();
    let standby = primary.standby();
    let urls = format!("{},{}", standby.url(), primary.url());
    let service = Process::start(&urls, &["--log", "off"]);
    let before = service.claim("k", "a", 600_000).await.expect("claimed").version();
    service.release("k", "a", before).await.expect("released");
    // Replicated before it is promoted.
    eventually(|| async {
        let released = "SELECT count(*) FROM fencepost.leases WHERE id LIKE '%_k' AND status = 1";
        number(&standby, released).await == 1
    })
    .await;
    standby.promote();
    let promoted = Instant::now();
    eventually(|| async {
        let key = format!("probe-{}", rand::random::<u64>());
        let reply = service.claim(&key, "a", 600_000).await;
        let arrived = "SELECT count(*) FROM fencepost.leases WHERE id LIKE '%probe-%'";
        reply.outcome() == "claimed" && number(&standby, arrived).await > 0
    })
    .await;
    let followed = promoted.elapsed();
    let after = service.claim("k", "b", 600_000).await.expect("claimed").version();
    assert!(after > before, "{after} is not above {before}");
    let above_clock = "SELECT floor - (extract(epoch FROM now()) * 1000000)::bigint \
                       FROM fencepost.floor";
    assert!(number(&standby, above_clock).await > 0, "the floor was not raised");
    primary.crash();
    let crashed = Instant::now();
    eventually(|| async { service.renew("k", "b", after).await.outcome() == "renewed" }).await;
    println!(
        "figure: failover: the promoted standby was written to {} ms after its promotion, the old \
         primary still running; its end was bridged in {} ms; the next version is {} higher",
        followed.as_millis(),
        crashed.elapsed().as_millis(),
        after - before
    );
    // So that its end finds it running.
    primary.launch();
}

async fn number(server: &Server, statement: &'static str) -> i64 {
    let mut connection = PgConnection::connect(&server.url()).await.unwrap();
    let number = sqlx::query_scalar(statement).fetch_one(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    number
}
