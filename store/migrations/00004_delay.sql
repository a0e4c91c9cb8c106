-- +goose NO TRANSACTION
-- +goose Up
-- Scheduled sends: tasks that are due more than delay.lead ahead. A ring of tables by due time, made from t_msg_delay_far by the
-- running program; the mover takes tasks to their queue table just before they are due. What a slot's tables hold when its time is
-- over are tombstones (status 9): they are truncated, and the slot takes the next span of time.

CREATE TABLE IF NOT EXISTS t_msg_delay_far (
  msg_id           BIGINT UNSIGNED   NOT NULL COMMENT 'the message; its top bits are the millisecond in which it was accepted',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT '1 email, 2 sms, 3 feishu, 4 inbox, 5 push, 6 webhook, 7 dingtalk, 8 wecom, 31 log',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller that sent the message in',
  request_id       VARCHAR(255)      NOT NULL DEFAULT '' COMMENT 'the key that the caller gave; empty: none',
  batch_id         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the campaign that the message belongs to; empty: none',
  category         ENUM('verification','notification','marketing') NOT NULL COMMENT 'names the policy: retries, expiry',
  priority         ENUM('high','middle','low') NOT NULL COMMENT 'the lane, which is to say the queue table',
  receiver         VARCHAR(512)      NOT NULL COMMENT 'the address on this channel',
  template_id      VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'empty: content is used',
  template_version INT UNSIGNED      NOT NULL DEFAULT 0 COMMENT 'the version that the message was accepted with',
  params           JSON              NULL COMMENT 'variables of the template',
  content          JSON              NULL COMMENT 'subject, text, html, when no template is used',
  status           TINYINT UNSIGNED  NOT NULL DEFAULT 0 COMMENT '0 ready, 9 moved: the task is elsewhere, the row no task any more',
  attempt          SMALLINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'attempts so far, the running one included; never reset',
  attempt_limit    SMALLINT UNSIGNED NOT NULL COMMENT 'after this many attempts the task is a dead letter',
  owner            VARCHAR(48)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '' COMMENT 'who moved the task away: node.boot.sequence; empty: it is here',
  due_time         DATETIME(3)       NOT NULL COMMENT 'when the message is to be sent (UTC)',
  next_time        DATETIME(3)       NOT NULL COMMENT 'the same, for the queue table that the task moves to (UTC)',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'not sent after this instant (UTC)',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked last',
  last_error       VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'what the last attempt ended with',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the message was accepted (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when Tidings last changed the row (UTC)',
  PRIMARY KEY (msg_id, channel),
  KEY idx_due (status, due_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='scheduled tasks that are due after the ring, or before it is made; t_msg_delay_<slot>_<shard> are tables like this one';

CREATE TABLE IF NOT EXISTS t_delay_slot (
  slot             SMALLINT UNSIGNED NOT NULL COMMENT 'the slot: its tasks are in t_msg_delay_<slot>_<shard>; 0 is t_msg_delay_far; numbers are not used twice',
  shards           SMALLINT UNSIGNED NOT NULL COMMENT 'how many tables, from shard 0',
  state            ENUM('far','new','ready','open','closing','retired') NOT NULL COMMENT 'new: its tables are being made; ready: all processes are to know of it; open: takes tasks; closing: takes none, and is emptied; retired: its tables are dropped',
  generation       INT UNSIGNED      NOT NULL COMMENT 'how often the slot has come round: 1 is the first time; …_g<n> are the tables of a generation that is over, …_t<n> the empty ones that take their place',
  from_time        DATETIME(3)       NOT NULL COMMENT 'takes tasks that are due from this instant (UTC) …',
  to_time          DATETIME(3)       NOT NULL COMMENT '… and before this one (UTC)',
  lease_end        DATETIME(3)       NOT NULL COMMENT 'not worked on before: somebody reads its tables; in row 0: a process turns the ring (UTC)',
  truncate_time    DATETIME(3)       NULL COMMENT 'when its tables were last truncated (UTC)',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when it was made (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when its state last changed (UTC)',
  PRIMARY KEY (slot)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='the ring of delay tables: which slot a due time belongs to';

INSERT IGNORE INTO t_delay_slot (slot, shards, state, generation, from_time, to_time, lease_end, create_time, modify_time) VALUES
  (0, 1, 'far', 0, '1000-01-01 00:00:00', '9999-12-31 00:00:00', '1000-01-01 00:00:00', UTC_TIMESTAMP(3), UTC_TIMESTAMP(3));

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_delay AS
  SELECT 't_msg_delay_far' AS place, msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time FROM t_msg_delay_far WHERE status <> 9;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_scheduled_by_hour AS
  SELECT due_hour, SUM(tasks) AS tasks FROM (SELECT DATE_FORMAT(due_time, '%Y-%m-%d %H:00') AS due_hour, COUNT(*) AS tasks FROM t_msg_delay_far WHERE status = 0 GROUP BY due_hour) AS tables_by_hour GROUP BY due_hour;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_task AS
  SELECT 't_msg_queue_high' AS place, msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_queue_high WHERE msg_id > 0
  UNION ALL SELECT 't_msg_queue_middle' AS place, msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_queue_middle WHERE msg_id > 0
  UNION ALL SELECT 't_msg_queue_low' AS place, msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_queue_low WHERE msg_id > 0
  UNION ALL SELECT place, msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM v_delay
  UNION ALL SELECT 't_msg_dead' AS place, msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_dead
  UNION ALL SELECT 't_msg_record' AS place, msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, finish_time, provider_msg_id FROM t_msg_record;
