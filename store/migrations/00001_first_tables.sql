-- +goose NO TRANSACTION
-- +goose Up
-- The queue: one table a lane, its rows the tasks still to be sent. A claim sets status 1, owner and the lease's end; the end
-- of a task moves its row to t_msg_record or t_msg_dead in one transaction. Rows with msg_id 0 and the year 9999 are no
-- tasks: they end the index range that a claim looks through.

CREATE TABLE IF NOT EXISTS t_msg_queue_high (
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
  status           TINYINT UNSIGNED  NOT NULL DEFAULT 0 COMMENT '0 ready, 1 sending, 2 unknown',
  attempt          SMALLINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'attempts so far, the running one included; never reset',
  attempt_limit    SMALLINT UNSIGNED NOT NULL COMMENT 'after this many attempts the task is a dead letter',
  owner            VARCHAR(48)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '' COMMENT 'the claim that holds the task: node.boot.sequence; empty: nobody',
  due_time         DATETIME(3)       NOT NULL COMMENT 'when the message was to be sent; never changed by a claim (UTC)',
  next_time        DATETIME(3)       NOT NULL COMMENT 'ready: not before; sending: end of the lease; unknown: end of the wait (UTC)',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'not sent after this instant (UTC)',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked last',
  last_error       VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'what the last attempt ended with',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the message was accepted (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when Tidings last changed the row (UTC)',
  PRIMARY KEY (msg_id, channel),
  KEY idx_ready (channel, status, next_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='lane high: tasks to send, most urgent; msg_id 0 marks the end of an index range';

CREATE TABLE IF NOT EXISTS t_msg_queue_middle (
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
  status           TINYINT UNSIGNED  NOT NULL DEFAULT 0 COMMENT '0 ready, 1 sending, 2 unknown',
  attempt          SMALLINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'attempts so far, the running one included; never reset',
  attempt_limit    SMALLINT UNSIGNED NOT NULL COMMENT 'after this many attempts the task is a dead letter',
  owner            VARCHAR(48)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '' COMMENT 'the claim that holds the task: node.boot.sequence; empty: nobody',
  due_time         DATETIME(3)       NOT NULL COMMENT 'when the message was to be sent; never changed by a claim (UTC)',
  next_time        DATETIME(3)       NOT NULL COMMENT 'ready: not before; sending: end of the lease; unknown: end of the wait (UTC)',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'not sent after this instant (UTC)',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked last',
  last_error       VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'what the last attempt ended with',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the message was accepted (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when Tidings last changed the row (UTC)',
  PRIMARY KEY (msg_id, channel),
  KEY idx_ready (channel, status, next_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='lane middle: tasks to send, ordinary; msg_id 0 marks the end of an index range';

CREATE TABLE IF NOT EXISTS t_msg_queue_low (
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
  status           TINYINT UNSIGNED  NOT NULL DEFAULT 0 COMMENT '0 ready, 1 sending, 2 unknown',
  attempt          SMALLINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'attempts so far, the running one included; never reset',
  attempt_limit    SMALLINT UNSIGNED NOT NULL COMMENT 'after this many attempts the task is a dead letter',
  owner            VARCHAR(48)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '' COMMENT 'the claim that holds the task: node.boot.sequence; empty: nobody',
  due_time         DATETIME(3)       NOT NULL COMMENT 'when the message was to be sent; never changed by a claim (UTC)',
  next_time        DATETIME(3)       NOT NULL COMMENT 'ready: not before; sending: end of the lease; unknown: end of the wait (UTC)',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'not sent after this instant (UTC)',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked last',
  last_error       VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'what the last attempt ended with',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the message was accepted (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when Tidings last changed the row (UTC)',
  PRIMARY KEY (msg_id, channel),
  KEY idx_ready (channel, status, next_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='lane low: tasks to send, can wait; msg_id 0 marks the end of an index range';

-- History, partitioned by day. Days are split off p_future a week ahead; what is too old leaves with its partition.

CREATE TABLE IF NOT EXISTS t_msg_record (
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
  status           TINYINT UNSIGNED  NOT NULL DEFAULT 3 COMMENT '3 success, 4 failed, 6 expired, 7 cancelled, 8 skipped',
  attempt          SMALLINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'attempts so far, the running one included; never reset',
  attempt_limit    SMALLINT UNSIGNED NOT NULL COMMENT 'after this many attempts the task is a dead letter',
  owner            VARCHAR(48)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '' COMMENT 'the claim that holds the task: node.boot.sequence; empty: nobody',
  due_time         DATETIME(3)       NOT NULL COMMENT 'when the message was to be sent; never changed by a claim (UTC)',
  next_time        DATETIME(3)       NOT NULL COMMENT 'ready: not before; sending: end of the lease; unknown: end of the wait (UTC)',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'not sent after this instant (UTC)',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked last',
  last_error       VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'what the last attempt ended with',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the message was accepted (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when Tidings last changed the row (UTC)',
  finish_time      DATETIME(3)       NOT NULL COMMENT 'when the task ended (UTC); the partition key',
  provider_msg_id  VARCHAR(255)      NOT NULL DEFAULT '' COMMENT 'the id that the provider gave',
  latency_ms       INT UNSIGNED      NOT NULL DEFAULT 0 COMMENT 'how long the provider took over the last attempt, ms',
  PRIMARY KEY (msg_id, channel, finish_time),
  KEY idx_receiver (receiver, create_time),
  KEY idx_source (source_id, create_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='tasks that have ended; rows never change and never leave but with their partition'
  PARTITION BY RANGE COLUMNS (finish_time) (PARTITION p_future VALUES LESS THAN (MAXVALUE));

CREATE TABLE IF NOT EXISTS t_msg_dead (
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
  status           TINYINT UNSIGNED  NOT NULL DEFAULT 5 COMMENT '5 dead',
  attempt          SMALLINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'attempts so far, the running one included; never reset',
  attempt_limit    SMALLINT UNSIGNED NOT NULL COMMENT 'after this many attempts the task is a dead letter',
  owner            VARCHAR(48)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '' COMMENT 'the claim that holds the task: node.boot.sequence; empty: nobody',
  due_time         DATETIME(3)       NOT NULL COMMENT 'when the message was to be sent; never changed by a claim (UTC)',
  next_time        DATETIME(3)       NOT NULL COMMENT 'ready: not before; sending: end of the lease; unknown: end of the wait (UTC)',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'not sent after this instant (UTC)',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked last',
  last_error       VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'what the last attempt ended with',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the message was accepted (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when Tidings last changed the row (UTC)',
  PRIMARY KEY (msg_id, channel),
  KEY idx_receiver (receiver, create_time),
  KEY idx_source (source_id, create_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='dead letters: attempts used up or outcome unknown; each waits for a person';

CREATE TABLE IF NOT EXISTS t_msg_attempt (
  msg_id           BIGINT UNSIGNED   NOT NULL COMMENT 'the message',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT 'as in the queue tables',
  attempt          SMALLINT UNSIGNED NOT NULL COMMENT 'which attempt, from 1',
  outcome          ENUM('temporary','permanent','unknown') NOT NULL COMMENT 'what the failure means',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked; empty: the attempt ended before one was chosen',
  code             VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the code that the provider answered with',
  text             VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'what went wrong, in words',
  latency_ms       INT UNSIGNED      NOT NULL DEFAULT 0 COMMENT 'how long the provider took, ms',
  node             SMALLINT UNSIGNED NOT NULL COMMENT 'the node that wrote the row',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the attempt ended (UTC); the partition key',
  PRIMARY KEY (msg_id, channel, attempt, create_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='one row for every attempt that did not end in success; append-only'
  PARTITION BY RANGE COLUMNS (create_time) (PARTITION p_future VALUES LESS THAN (MAXVALUE));

-- Idempotency and nodes.

CREATE TABLE IF NOT EXISTS t_idempotency (
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller',
  request_hash     BINARY(32)        NOT NULL COMMENT 'SHA-256 of the request_id',
  msg_id           BIGINT UNSIGNED   NOT NULL COMMENT 'the message that the key stands for',
  body_hash        BINARY(32)        NOT NULL COMMENT 'SHA-256 of the decoded request: the same key with another body is a conflict',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'the key may be forgotten after this instant (UTC)',
  PRIMARY KEY (source_id, request_hash),
  KEY idx_expire (expire_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='one row for every message that came with a request_id, written in the transaction that accepts it';

CREATE TABLE IF NOT EXISTS t_node (
  node             SMALLINT UNSIGNED NOT NULL COMMENT 'the number inside message ids, 0 to 1023',
  boot             INT UNSIGNED      NOT NULL COMMENT 'how often the number has been taken',
  holder           VARCHAR(64)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'a random name of the process that holds the number; empty: nobody',
  host             VARCHAR(255)      NOT NULL COMMENT 'the machine it runs on',
  pid              INT UNSIGNED      NOT NULL COMMENT 'its process id there',
  version          VARCHAR(64)       NOT NULL COMMENT 'its version of Tidings',
  start_time       DATETIME(3)       NOT NULL COMMENT 'when it took the number (UTC)',
  lease_end        DATETIME(3)       NOT NULL COMMENT 'the number is its own until then (UTC); renewed every few seconds',
  PRIMARY KEY (node)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='leases on node numbers; a row whose lease_end lies ahead is a living process';

-- One row a lane and channel to end the index range.

INSERT IGNORE INTO t_msg_queue_high
  (msg_id, channel, source_id, category, priority, receiver, attempt_limit, due_time, next_time, expire_time, create_time, modify_time) VALUES
  (0, 1, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 2, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 3, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 4, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 5, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 6, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 7, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 8, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 31, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00');

INSERT IGNORE INTO t_msg_queue_middle
  (msg_id, channel, source_id, category, priority, receiver, attempt_limit, due_time, next_time, expire_time, create_time, modify_time) VALUES
  (0, 1, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 2, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 3, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 4, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 5, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 6, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 7, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 8, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 31, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00');

INSERT IGNORE INTO t_msg_queue_low
  (msg_id, channel, source_id, category, priority, receiver, attempt_limit, due_time, next_time, expire_time, create_time, modify_time) VALUES
  (0, 1, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 2, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 3, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 4, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 5, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 6, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 7, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 8, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 31, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00');

-- Views for people. Each message is read over all places at once, so that a task that moves is seen once.
-- v_task: every task wherever it is (primary key of each table). v_message: one row a message with its derived status.
-- v_attempt: every attempt, the successful one included.

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_task AS
  SELECT 't_msg_queue_high' AS place, msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_queue_high WHERE msg_id > 0
  UNION ALL SELECT 't_msg_queue_middle' AS place, msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_queue_middle WHERE msg_id > 0
  UNION ALL SELECT 't_msg_queue_low' AS place, msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_queue_low WHERE msg_id > 0
  UNION ALL SELECT 't_msg_dead' AS place, msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_dead
  UNION ALL SELECT 't_msg_record' AS place, msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, finish_time, provider_msg_id FROM t_msg_record;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_message AS
  SELECT msg_id, MIN(source_id) AS source_id, MIN(request_id) AS request_id,
    CASE
      WHEN SUM(status IN (1, 2) OR (status = 0 AND attempt > 0)) > 0 THEN 'sending'
      WHEN SUM(status = 0) > 0 THEN IF(MIN(IF(status = 0, due_time, NULL)) > UTC_TIMESTAMP(3), 'scheduled', 'dispatched')
      WHEN SUM(status <> 8) = 0 THEN 'skipped'
      WHEN SUM(status = 3) = SUM(status <> 8) THEN 'success'
      WHEN SUM(status = 3) > 0 THEN 'partial'
      WHEN SUM(status = 7) = SUM(status <> 8) THEN 'cancelled'
      WHEN SUM(status = 6) = SUM(status <> 8) THEN 'expired'
      ELSE 'failed'
    END AS status,
    COUNT(*) AS tasks, MIN(create_time) AS create_time, MIN(due_time) AS due_time, MAX(finish_time) AS finish_time
  FROM v_task GROUP BY msg_id;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_attempt AS
  SELECT msg_id, channel, attempt, outcome, provider, code, text, latency_ms, node, create_time FROM t_msg_attempt
  UNION ALL SELECT msg_id, channel, attempt, 'success', provider, provider_msg_id, '', latency_ms, NULL, finish_time FROM t_msg_record WHERE status = 3;
