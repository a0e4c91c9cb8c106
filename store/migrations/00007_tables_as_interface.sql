-- +goose NO TRANSACTION
-- +goose Up
-- Tables as an interface: requests by SQL, figures by provider, views in words.


CREATE TABLE IF NOT EXISTS t_msg_submit (
  submit_id        BIGINT UNSIGNED   NOT NULL AUTO_INCREMENT COMMENT 'the row',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller, as in t_source; default while no caller is registered',
  request_id       VARCHAR(255)      NOT NULL DEFAULT '' COMMENT 'the key of the message, the same as by HTTP; empty: submit-<submit_id>',
  template_id      VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'a template, instead of content',
  channels         VARCHAR(255)      NOT NULL COMMENT 'the channels to send over, with commas between them: email,sms',
  priority         VARCHAR(16)       NOT NULL DEFAULT '' COMMENT 'high, middle or low; empty: the category''s',
  category         VARCHAR(16)       NOT NULL DEFAULT '' COMMENT 'verification, notification or marketing; empty: the template''s, or notification',
  receiver         VARCHAR(2048)     NOT NULL COMMENT 'an address, or a JSON object with an address for each channel',
  params           JSON              NULL COMMENT 'the template''s variables, an object; NULL again when the message is accepted',
  content          JSON              NULL COMMENT 'an object: subject, text, html, attachments, as by HTTP; NULL again when the message is accepted',
  send_at          DATETIME(3)       NULL COMMENT 'not sent before (UTC); NULL: at once',
  expire_time      DATETIME(3)       NULL COMMENT 'not sent after (UTC); NULL: as the category says, from send_at or create_time on',
  status           ENUM('new','accepted','rejected') NOT NULL DEFAULT 'new' COMMENT 'new: not taken yet; rejected: see error; set to new again it is tried again',
  msg_id           BIGINT UNSIGNED   NULL COMMENT 'the message that it became, or that its key stood for already',
  error            VARCHAR(1024)     NOT NULL DEFAULT '' COMMENT 'rejected: what is wrong with it; new: why it waits',
  create_time      DATETIME(3)       NOT NULL DEFAULT (UTC_TIMESTAMP(3)) COMMENT 'when it was inserted (UTC)',
  next_time        DATETIME(3)       NOT NULL DEFAULT '1000-01-01 00:00:00.000' COMMENT 'new: not tried before; else: since when it has been accepted or rejected (UTC)',
  PRIMARY KEY (submit_id),
  KEY idx_status (status, next_time),
  KEY idx_request (source_id, request_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='requests by SQL: an outbox in the caller''s own transaction';


CREATE TABLE IF NOT EXISTS t_duty (
  duty             VARCHAR(32)       NOT NULL COMMENT 'submit: takes requests from t_msg_submit; retention: drops what is too old',
  owner            VARCHAR(48)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '' COMMENT 'the process that does it: node.boot.sequence; empty: nobody',
  lease_end        DATETIME(3)       NOT NULL COMMENT 'until then nobody else does (UTC)',
  done_time        DATETIME(3)       NULL COMMENT 'when it was last done to its end (UTC); NULL: never',
  last_error       VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'why it could not be done; empty: it could',
  PRIMARY KEY (duty)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='work that one process does for all, and which one';

INSERT IGNORE INTO t_duty (duty, lease_end) VALUES ('submit', UTC_TIMESTAMP(3)), ('retention', UTC_TIMESTAMP(3));

CREATE TABLE IF NOT EXISTS t_attempt_hour (
  hour             DATETIME          NOT NULL COMMENT 'the hour in which the attempts ended (UTC)',
  node             SMALLINT UNSIGNED NOT NULL COMMENT 'the process that made them: each adds to rows of its own',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked; empty: the attempt ended before one was chosen',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT 'numbered as in the queue tables',
  outcome          ENUM('temporary','permanent','unknown') NOT NULL COMMENT 'as in t_msg_attempt',
  attempts         BIGINT UNSIGNED   NOT NULL COMMENT 'how many',
  latency_ms       BIGINT UNSIGNED   NOT NULL COMMENT 'their latencies, added up, ms',
  PRIMARY KEY (hour, node, provider, channel, outcome)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='attempts that did not end in success, by hour: written in the transaction that logs them in t_msg_attempt';

-- Figures by provider and by day, once, however often this is run.
SET @tidings_ddl = IF((SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = 't_stat_hour' AND column_name = 'provider') = 0,
  'ALTER TABLE t_stat_hour ADD COLUMN provider VARCHAR(64) NOT NULL DEFAULT '''' COMMENT ''the provider asked last; empty: none was'' AFTER category,
    ADD COLUMN day DATE AS (CAST(hour AS DATE)) VIRTUAL COMMENT ''the day of the hour (UTC)'',
    DROP PRIMARY KEY, ADD PRIMARY KEY (hour, node, source_id, template_id, channel, category, provider, outcome), ADD KEY idx_day (day)', 'DO 0');

PREPARE tidings_ddl FROM @tidings_ddl;

EXECUTE tidings_ddl;

DEALLOCATE PREPARE tidings_ddl;

-- Retries are counted by the index alone.
SET @tidings_ddl = IF((SELECT COUNT(*) FROM information_schema.statistics WHERE table_schema = DATABASE() AND table_name = 't_msg_queue_high' AND index_name = 'idx_ready' AND column_name = 'attempt') = 0,
  'ALTER TABLE t_msg_queue_high DROP KEY idx_ready, ADD KEY idx_ready (channel, status, next_time, attempt)', 'DO 0');

PREPARE tidings_ddl FROM @tidings_ddl;

EXECUTE tidings_ddl;

DEALLOCATE PREPARE tidings_ddl;

SET @tidings_ddl = IF((SELECT COUNT(*) FROM information_schema.statistics WHERE table_schema = DATABASE() AND table_name = 't_msg_queue_middle' AND index_name = 'idx_ready' AND column_name = 'attempt') = 0,
  'ALTER TABLE t_msg_queue_middle DROP KEY idx_ready, ADD KEY idx_ready (channel, status, next_time, attempt)', 'DO 0');

PREPARE tidings_ddl FROM @tidings_ddl;

EXECUTE tidings_ddl;

DEALLOCATE PREPARE tidings_ddl;

SET @tidings_ddl = IF((SELECT COUNT(*) FROM information_schema.statistics WHERE table_schema = DATABASE() AND table_name = 't_msg_queue_low' AND index_name = 'idx_ready' AND column_name = 'attempt') = 0,
  'ALTER TABLE t_msg_queue_low DROP KEY idx_ready, ADD KEY idx_ready (channel, status, next_time, attempt)', 'DO 0');

PREPARE tidings_ddl FROM @tidings_ddl;

EXECUTE tidings_ddl;

DEALLOCATE PREPARE tidings_ddl;

SET @tidings_ddl = IF((SELECT COUNT(*) FROM information_schema.statistics WHERE table_schema = DATABASE() AND table_name = 't_msg_attempt' AND index_name = 'idx_outcome' AND column_name = 'outcome') = 0,
  'ALTER TABLE t_msg_attempt ADD KEY idx_outcome (outcome, create_time)', 'DO 0');

PREPARE tidings_ddl FROM @tidings_ddl;

EXECUTE tidings_ddl;

DEALLOCATE PREPARE tidings_ddl;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_delay AS
  SELECT 't_msg_delay_far' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time FROM t_msg_delay_far WHERE status = 0;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_scheduled_by_hour AS
  SELECT due_hour, SUM(tasks) AS tasks FROM (
    SELECT FROM_DAYS(TO_DAYS(due_time)) + INTERVAL HOUR(due_time) HOUR AS due_hour, COUNT(*) AS tasks FROM t_msg_delay_far WHERE status = 0 GROUP BY due_hour
  ) AS counted GROUP BY due_hour;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_batch AS
  SELECT source_id, batch_id, create_time, SUM(tasks) AS tasks, SUM(IF(status = 0, tasks, 0)) AS `ready`, SUM(IF(status = 1, tasks, 0)) AS `sending`, SUM(IF(status = 2, tasks, 0)) AS `unknown`, SUM(IF(status = 3, tasks, 0)) AS `success`, SUM(IF(status = 4, tasks, 0)) AS `failed`, SUM(IF(status = 5, tasks, 0)) AS `dead`, SUM(IF(status = 6, tasks, 0)) AS `expired`, SUM(IF(status = 7, tasks, 0)) AS `cancelled`, SUM(IF(status = 8, tasks, 0)) AS `skipped` FROM (
    SELECT b.source_id, b.batch_id, b.create_time, t.status, COUNT(*) AS tasks FROM t_batch AS b STRAIGHT_JOIN t_msg_queue_high AS t ON t.msg_id BETWEEN b.first_msg_id AND b.last_msg_id AND t.batch_id = b.batch_id AND t.source_id = b.source_id GROUP BY b.source_id, b.batch_id, b.create_time, t.status
    UNION ALL SELECT b.source_id, b.batch_id, b.create_time, t.status, COUNT(*) AS tasks FROM t_batch AS b STRAIGHT_JOIN t_msg_queue_middle AS t ON t.msg_id BETWEEN b.first_msg_id AND b.last_msg_id AND t.batch_id = b.batch_id AND t.source_id = b.source_id GROUP BY b.source_id, b.batch_id, b.create_time, t.status
    UNION ALL SELECT b.source_id, b.batch_id, b.create_time, t.status, COUNT(*) AS tasks FROM t_batch AS b STRAIGHT_JOIN t_msg_queue_low AS t ON t.msg_id BETWEEN b.first_msg_id AND b.last_msg_id AND t.batch_id = b.batch_id AND t.source_id = b.source_id GROUP BY b.source_id, b.batch_id, b.create_time, t.status
    UNION ALL SELECT b.source_id, b.batch_id, b.create_time, t.status, COUNT(*) AS tasks FROM t_batch AS b STRAIGHT_JOIN t_msg_delay_far AS t ON t.msg_id BETWEEN b.first_msg_id AND b.last_msg_id AND t.batch_id = b.batch_id AND t.source_id = b.source_id AND t.status = 0 GROUP BY b.source_id, b.batch_id, b.create_time, t.status
    UNION ALL SELECT b.source_id, b.batch_id, b.create_time, t.status, COUNT(*) AS tasks FROM t_batch AS b STRAIGHT_JOIN t_msg_dead AS t ON t.msg_id BETWEEN b.first_msg_id AND b.last_msg_id AND t.batch_id = b.batch_id AND t.source_id = b.source_id GROUP BY b.source_id, b.batch_id, b.create_time, t.status
    UNION ALL SELECT b.source_id, b.batch_id, b.create_time, t.status, COUNT(*) AS tasks FROM t_batch AS b STRAIGHT_JOIN t_msg_record AS t ON t.msg_id BETWEEN b.first_msg_id AND b.last_msg_id AND t.batch_id = b.batch_id AND t.source_id = b.source_id GROUP BY b.source_id, b.batch_id, b.create_time, t.status
  ) AS counted GROUP BY source_id, batch_id, create_time;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_task AS
  SELECT 't_msg_queue_high' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_queue_high WHERE msg_id > 0
  UNION ALL SELECT 't_msg_queue_middle' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_queue_middle WHERE msg_id > 0
  UNION ALL SELECT 't_msg_queue_low' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_queue_low WHERE msg_id > 0
  UNION ALL SELECT place, msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM v_delay
  UNION ALL SELECT 't_msg_dead' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_dead
  UNION ALL SELECT 't_msg_record' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, finish_time, provider_msg_id FROM t_msg_record;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_message AS
  SELECT msg_id, MIN(source_id) AS source_id, MIN(request_id) AS request_id,
    CASE
      WHEN SUM(status IN ('sending', 'unknown') OR (status = 'ready' AND attempt > 0)) > 0 THEN 'sending'
      WHEN SUM(status = 'ready') > 0 THEN IF(MIN(IF(status = 'ready', due_time, NULL)) > UTC_TIMESTAMP(3), 'scheduled', 'dispatched')
      WHEN SUM(status <> 'skipped') = 0 THEN 'skipped'
      WHEN SUM(status = 'success') = SUM(status <> 'skipped') THEN 'success'
      WHEN SUM(status = 'success') > 0 THEN 'partial'
      WHEN SUM(status = 'cancelled') = SUM(status <> 'skipped') THEN 'cancelled'
      WHEN SUM(status = 'expired') = SUM(status <> 'skipped') THEN 'expired'
      ELSE 'failed'
    END AS status,
    COUNT(*) AS tasks, MIN(create_time) AS create_time, MIN(due_time) AS due_time, MAX(finish_time) AS finish_time
  FROM v_task GROUP BY msg_id;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_attempt AS
  SELECT msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, attempt, outcome, provider, code, text, latency_ms, node, create_time FROM t_msg_attempt
  UNION ALL SELECT msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, attempt, 'success', provider, provider_msg_id, '', latency_ms, NULL, finish_time FROM t_msg_record WHERE status = 3;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_queue AS
  SELECT lane, IF(counted.channel = 31, 'log', ELT(counted.channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, SUM(queued) - SUM(later) AS ready, SUM(later) - SUM(retrying) AS waiting, SUM(retrying) AS retrying, SUM(sending) AS sending, SUM(unknown) AS unknown,
    COALESCE(GREATEST(TIMESTAMPDIFF(SECOND, MIN(first_time), UTC_TIMESTAMP(3)), 0), 0) AS oldest_s, MIN(next_due) AS next_due FROM (
    SELECT 'high' AS lane, channel, IF(status = 0, COUNT(*), 0) AS queued, 0 AS later, 0 AS retrying, IF(status = 1, COUNT(*), 0) AS sending, IF(status = 2, COUNT(*), 0) AS unknown,
      IF(status = 0, MIN(next_time), NULL) AS first_time, NULL AS next_due FROM t_msg_queue_high FORCE INDEX (idx_ready) WHERE msg_id > 0 GROUP BY channel, status
    UNION ALL SELECT 'high', channel, 0, COUNT(*), SUM(attempt > 0), 0, 0, NULL, MIN(next_time) FROM t_msg_queue_high FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status = 0 AND next_time > UTC_TIMESTAMP(3) AND next_time < '9000-01-01' GROUP BY channel
    UNION ALL SELECT 'middle' AS lane, channel, IF(status = 0, COUNT(*), 0) AS queued, 0 AS later, 0 AS retrying, IF(status = 1, COUNT(*), 0) AS sending, IF(status = 2, COUNT(*), 0) AS unknown,
      IF(status = 0, MIN(next_time), NULL) AS first_time, NULL AS next_due FROM t_msg_queue_middle FORCE INDEX (idx_ready) WHERE msg_id > 0 GROUP BY channel, status
    UNION ALL SELECT 'middle', channel, 0, COUNT(*), SUM(attempt > 0), 0, 0, NULL, MIN(next_time) FROM t_msg_queue_middle FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status = 0 AND next_time > UTC_TIMESTAMP(3) AND next_time < '9000-01-01' GROUP BY channel
    UNION ALL SELECT 'low' AS lane, channel, IF(status = 0, COUNT(*), 0) AS queued, 0 AS later, 0 AS retrying, IF(status = 1, COUNT(*), 0) AS sending, IF(status = 2, COUNT(*), 0) AS unknown,
      IF(status = 0, MIN(next_time), NULL) AS first_time, NULL AS next_due FROM t_msg_queue_low FORCE INDEX (idx_ready) WHERE msg_id > 0 GROUP BY channel, status
    UNION ALL SELECT 'low', channel, 0, COUNT(*), SUM(attempt > 0), 0, 0, NULL, MIN(next_time) FROM t_msg_queue_low FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status = 0 AND next_time > UTC_TIMESTAMP(3) AND next_time < '9000-01-01' GROUP BY channel
  ) AS counted GROUP BY lane, counted.channel;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_stuck AS
  (SELECT 't_msg_queue_high' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, 'its lease or its wait has ended, and nobody took it over' AS why, next_time AS since, attempt, owner, provider, last_error FROM t_msg_queue_high FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status IN (1, 2) AND next_time < UTC_TIMESTAMP(3) - INTERVAL 1 MINUTE LIMIT 1000)
  UNION ALL (SELECT 't_msg_queue_high' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, 'it has been due for more than 10 minutes' AS why, next_time AS since, attempt, owner, provider, last_error FROM t_msg_queue_high FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status = 0 AND next_time < UTC_TIMESTAMP(3) - INTERVAL 10 MINUTE LIMIT 1000)
  UNION ALL (SELECT 't_msg_queue_middle' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, 'its lease or its wait has ended, and nobody took it over' AS why, next_time AS since, attempt, owner, provider, last_error FROM t_msg_queue_middle FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status IN (1, 2) AND next_time < UTC_TIMESTAMP(3) - INTERVAL 1 MINUTE LIMIT 1000)
  UNION ALL (SELECT 't_msg_queue_middle' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, 'it has been due for more than 10 minutes' AS why, next_time AS since, attempt, owner, provider, last_error FROM t_msg_queue_middle FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status = 0 AND next_time < UTC_TIMESTAMP(3) - INTERVAL 10 MINUTE LIMIT 1000)
  UNION ALL (SELECT 't_msg_queue_low' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, 'its lease or its wait has ended, and nobody took it over' AS why, next_time AS since, attempt, owner, provider, last_error FROM t_msg_queue_low FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status IN (1, 2) AND next_time < UTC_TIMESTAMP(3) - INTERVAL 1 MINUTE LIMIT 1000)
  UNION ALL (SELECT 't_msg_queue_low' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, 'it has been due for more than 10 minutes' AS why, next_time AS since, attempt, owner, provider, last_error FROM t_msg_queue_low FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status = 0 AND next_time < UTC_TIMESTAMP(3) - INTERVAL 10 MINUTE LIMIT 1000)
  UNION ALL (SELECT place, msg_id, channel, source_id, status, 'it is due, and was not moved to its queue', due_time, attempt, owner, provider, last_error FROM v_delay WHERE due_time < UTC_TIMESTAMP(3) - INTERVAL 1 MINUTE LIMIT 1000);

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_dead_by_reason AS
  SELECT category, IF(t_msg_dead.channel = 31, 'log', ELT(t_msg_dead.channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, provider, REGEXP_REPLACE(last_error, '(?=[0-9A-Za-z_.:-]{6})[A-Za-z_.:-]*[0-9][0-9A-Za-z_.:-]*', '…') AS reason, COUNT(*) AS tasks, MIN(modify_time) AS first_time, MAX(modify_time) AS last_time,
    MAX(msg_id) AS example_msg_id FROM t_msg_dead GROUP BY category, t_msg_dead.channel, provider, reason;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_provider_hour AS
  SELECT hour, provider, IF(attempts_made.channel = 31, 'log', ELT(attempts_made.channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, SUM(success) AS success, SUM(temporary) AS temporary, SUM(permanent) AS permanent, SUM(unknown) AS unknown,
    ROUND(100 * SUM(success) / NULLIF(SUM(success + temporary + permanent + unknown), 0), 1) AS success_percent, ROUND(SUM(latency_ms) / NULLIF(SUM(success + temporary + permanent + unknown), 0)) AS latency_ms FROM (
    SELECT hour, provider, channel, tasks AS success, 0 AS temporary, 0 AS permanent, 0 AS unknown, latency_ms FROM t_stat_hour WHERE outcome = 'success'
    UNION ALL SELECT hour, provider, channel, 0, IF(outcome = 'temporary', attempts, 0), IF(outcome = 'permanent', attempts, 0), IF(outcome = 'unknown', attempts, 0), latency_ms FROM t_attempt_hour
  ) AS attempts_made GROUP BY hour, provider, attempts_made.channel;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_source_day AS
  SELECT day, source_id, template_id, IF(t_stat_hour.channel = 31, 'log', ELT(t_stat_hour.channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, SUM(tasks) AS tasks, SUM(IF(outcome = 'success', tasks, 0)) AS success, SUM(IF(outcome = 'failed', tasks, 0)) AS failed, SUM(IF(outcome = 'expired', tasks, 0)) AS expired, SUM(IF(outcome = 'cancelled', tasks, 0)) AS cancelled, SUM(IF(outcome = 'skipped', tasks, 0)) AS skipped,
    ROUND(100 * SUM(IF(outcome = 'success', tasks, 0)) / NULLIF(SUM(IF(outcome IN ('success', 'failed', 'expired'), tasks, 0)), 0), 1) AS reach_percent,
    ROUND(SUM(IF(outcome = 'success', latency_ms, 0)) / NULLIF(SUM(IF(outcome = 'success', tasks, 0)), 0)) AS latency_ms
  FROM t_stat_hour GROUP BY day, source_id, template_id, t_stat_hour.channel;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_duplicates AS
  SELECT a.msg_id, IF(a.channel = 31, 'log', ELT(a.channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, a.attempt AS unknown_attempt, a.provider, a.text, a.create_time AS unknown_time, r.attempt AS attempts, ELT(r.status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, r.provider AS last_provider, r.finish_time
  FROM t_msg_attempt AS a JOIN t_msg_record AS r ON r.msg_id = a.msg_id AND r.channel = a.channel AND r.finish_time >= a.create_time
  WHERE a.outcome = 'unknown' AND r.attempt > a.attempt;

ALTER TABLE t_node COMMENT = 'leases on node numbers; a row with a holder whose lease_end lies ahead is a living process';

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_nodes AS
  SELECT node, CASE WHEN holder = '' THEN 'left' WHEN lease_end > UTC_TIMESTAMP(3) THEN 'alive' ELSE 'gone' END AS status, IF(serves = 1, 'serve', 'command') AS role, host, pid, version, boot, start_time, lease_end FROM t_node;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_lanes AS
  SELECT lane, IF(paused = 1, 'paused', 'running') AS status, weight, reason, modify_by, modify_time FROM t_lane;
